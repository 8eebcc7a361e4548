// A CPU allocator for torch that counts every byte, stops at a hard cap, and gives memory back to the kernel.
//
//   * live bytes are exactly what torch asked for: no rounding, no headers;
//   * live + cached never passes the cap: an allocation that would pass it first drops cached pages and is tried once
//     more, then raises c10::OutOfMemoryError, which Python sees as torch.OutOfMemoryError;
//   * the resident set follows: freed pages stay mapped only up to the cache limit.
//
// Blocks below kLargeBytes come from malloc, larger ones from the page heap. Fresh pages are dear (docs/meters.md), so
// freed extents are reused for any smaller request before the kernel is asked for new ones.
//
// The Python side is counting_lib.py. Nothing here is ever unloaded: tensors may outlive the meter.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <cstdint>
#include <cstdlib>

#include "page_heap.h"

namespace {

constexpr size_t kAlign = 64;  // what torch's own allocator promises (c10::gAlignment)
constexpr size_t kLargeBytes = 64u << 10;

// ------------------------------------------------------------------------------------------------ small blocks

// malloc plus hand alignment: glibc's memalign before 2.38 does not reuse the chunks it frees. Small blocks never start
// on a page boundary, which is how release() tells them from the page heap's.
struct Header {
  void* base;
  size_t bytes;
};

uintptr_t place(void* base) { return round_up(reinterpret_cast<uintptr_t>(base) + sizeof(Header), kAlign); }

void* allocate_small(size_t n) {
  const int64_t bytes = static_cast<int64_t>(n);
  int64_t live = charge(bytes);
  if (live < 0 && room_beside(bytes) >= 0) {
    heap().trim_to(room_beside(bytes));
    live = charge(bytes);
  }
  if (live < 0) {
    return nullptr;
  }
  void* base = std::malloc(n + kAlign + sizeof(Header));
  uintptr_t data = place(base);
  if (base != nullptr && data % kPage == 0) {
    std::free(base);
    base = std::malloc(n + 2 * kAlign + sizeof(Header));
    data = place(base);
    data += data % kPage == 0 ? kAlign : 0;
  }
  if (base == nullptr) {
    g_live.fetch_sub(bytes);
    return nullptr;
  }
  reinterpret_cast<Header*>(data)[-1] = Header{base, n};
  g_small.fetch_add(bytes, std::memory_order_relaxed);
  raise_to(g_peak, live);
  note_reserved();
  return reinterpret_cast<void*>(data);
}

void release_small(void* pointer) {
  const Header header = static_cast<Header*>(pointer)[-1];
  const int64_t bytes = static_cast<int64_t>(header.bytes);
  g_small.fetch_sub(bytes, std::memory_order_relaxed);
  g_live.fetch_sub(bytes, std::memory_order_relaxed);
  std::free(header.base);
}

// --------------------------------------------------------------------------------------------- torch's interface

void release(void* pointer) {
  if (pointer == nullptr) {
    return;
  }
  c10::profiledCPUMemoryReporter().Delete(pointer);
  if (reinterpret_cast<uintptr_t>(pointer) % kPage == 0) {
    heap().release(pointer);
  } else {
    release_small(pointer);
  }
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (n == 0) {
      return {nullptr, nullptr, &release, cpu};
    }
    void* const data = n < kLargeBytes ? allocate_small(n) : n > kUnlimited / 2 ? nullptr : heap().allocate(n);
    if (data == nullptr) {
      g_failed_bytes.store(static_cast<int64_t>(n));
      g_failed_count.fetch_add(1);
      c10::profiledCPUMemoryReporter().OutOfMemory(n);
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          false,
          "CPU out of memory. Tried to allocate ", n, " bytes; ", g_live.load(), " bytes are live and the cap is ",
          g_cap.load(), " bytes.");
    }
    c10::profiledCPUMemoryReporter().New(data, n);
    return {data, data, &release, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* dest, const void* src, std::size_t count) const override { default_copy_data(dest, src, count); }
};

// A child forked while another thread holds the heap would wait for ever.
void lock_for_fork() { heap().mutex.lock(); }
void unlock_after_fork() { heap().mutex.unlock(); }

}  // namespace

extern "C" {

// Makes torch allocate here; returns 1, or 0 when an allocator of higher priority is in place.
int64_t trainer_rank_install() {
  static CountingAllocator* const allocator = [] {
    pthread_atfork(&lock_for_fork, &unlock_after_fork, &unlock_after_fork);
    return new CountingAllocator;
  }();
  c10::SetCPUAllocator(allocator);
  return c10::GetCPUAllocator() == allocator ? 1 : 0;
}

int64_t trainer_rank_live() { return g_live.load(); }
int64_t trainer_rank_peak() { return g_peak.load(); }
int64_t trainer_rank_cached() { return g_cached.load(); }
int64_t trainer_rank_reserved() { return g_mapped.load() + g_small.load(); }
int64_t trainer_rank_peak_reserved() { return g_peak_reserved.load(); }
int64_t trainer_rank_resident() { return heap().resident() + g_small.load(); }
int64_t trainer_rank_failed_bytes() { return g_failed_bytes.load(); }
int64_t trainer_rank_failed_count() { return g_failed_count.load(); }

void trainer_rank_reset_peak() {
  g_peak.store(g_live.load());
  g_peak_reserved.store(g_mapped.load() + g_small.load());
}

// cap < 0 lifts it.
void trainer_rank_set_cap(int64_t cap) {
  g_cap.store(cap < 0 ? kUnlimited : cap);
  heap().trim_to(PageHeap::allowed());
}

void trainer_rank_set_cache_limit(int64_t limit) {
  g_cache_limit.store(limit);
  heap().trim_to(PageHeap::allowed());
}

void trainer_rank_set_huge_pages(int64_t enabled) { g_use_huge_pages.store(enabled != 0); }

void trainer_rank_release_cached() { heap().trim_to(0); }

}  // extern "C"
