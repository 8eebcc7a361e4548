// Counters with a hard cap, and the page heap they govern: large blocks carved out of whole huge pages, best fit, split
// on allocation and merged on free. Linux only; knows nothing of torch. Used by counting_allocator.cpp.

#pragma once

#include <sys/mman.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kHuge = 2u << 20;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
size_t round_down(size_t n, size_t unit) { return n / unit * unit; }

// ---------------------------------------------------------------------------------------------------- counters

std::atomic<int64_t> g_live{0};          // bytes asked for and not yet freed
std::atomic<int64_t> g_peak{0};          // largest g_live since reset_peak
std::atomic<int64_t> g_small{0};         // the part of g_live that lives in malloc
std::atomic<int64_t> g_mapped{0};        // bytes mapped by the page heap, live or cached
std::atomic<int64_t> g_peak_reserved{0};  // largest g_mapped + g_small since reset_peak
std::atomic<int64_t> g_cached{0};        // the part of g_mapped that no tensor owns
std::atomic<int64_t> g_cap{kUnlimited};  // bound on g_live + g_cached
std::atomic<int64_t> g_cache_limit{0};
std::atomic<int64_t> g_failed_bytes{0};  // size of the last allocation refused
std::atomic<int64_t> g_failed_count{0};
std::atomic<bool> g_use_huge_pages{true};

void raise_to(std::atomic<int64_t>& peak, int64_t value) {
  int64_t seen = peak.load(std::memory_order_relaxed);
  while (value > seen && !peak.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

void note_reserved() { raise_to(g_peak_reserved, g_mapped.load() + g_small.load()); }

// Adds n to g_live if the cap allows it beside the cache. Returns the new g_live, or -1.
int64_t charge(int64_t n) {
  int64_t live = g_live.load(std::memory_order_relaxed);
  do {
    const int64_t cap = g_cap.load(std::memory_order_relaxed);
    if (n > cap || live > cap - n || g_cached.load() > cap - n - live) {
      return -1;
    }
  } while (!g_live.compare_exchange_weak(live, live + n, std::memory_order_relaxed));
  return live + n;
}

// Bytes that may stay cached once n more are live; negative when n bytes cannot be had at all.
int64_t room_beside(int64_t n) { return g_cap.load() - g_live.load() - n; }

// --------------------------------------------------------------------------------------------------- page heap

// Whatever touching a block can bring into memory is mapped here, as live or as cached, so mapped bytes bound resident
// bytes from above.
class PageHeap {
 public:
  // Returns a page-aligned block of at least n bytes, charged to g_live, or nullptr.
  void* allocate(size_t n) {
    const std::lock_guard<std::mutex> guard(mutex);
    const size_t length = round_up(n, kPage);
    const int64_t bytes = static_cast<int64_t>(n);
    const auto fit = by_size_.lower_bound({length, 0});
    // Taken before the charge: what is reused must not be dropped to make room for itself.
    uintptr_t start = fit == by_size_.end() ? 0 : take(fit->second, length);
    int64_t live = charge(bytes);
    if (live < 0 && room_beside(bytes) >= 0) {
      trim(room_beside(bytes));
      live = charge(bytes);
    }
    if (live < 0) {
      if (start != 0) {
        insert(start, length, ++clock_);
      }
      return nullptr;
    }
    if (start == 0) {
      start = map(length);
    }
    if (start == 0) {
      trim(0);
      start = map(length);
    }
    if (start == 0) {
      g_live.fetch_sub(bytes);
      return nullptr;
    }
    raise_to(g_peak, live);
    live_.emplace(start, Block{n, length});
    note_reserved();
    return reinterpret_cast<void*>(start);
  }

  void release(void* pointer) {
    const std::lock_guard<std::mutex> guard(mutex);
    const auto found = live_.find(reinterpret_cast<uintptr_t>(pointer));
    const Block block = found->second;
    live_.erase(found);
    g_live.fetch_sub(static_cast<int64_t>(block.bytes), std::memory_order_relaxed);
    insert(reinterpret_cast<uintptr_t>(pointer), block.length, ++clock_);
    trim(allowed());
  }

  void trim_to(int64_t target) {
    const std::lock_guard<std::mutex> guard(mutex);
    trim(target);
  }

  // Cached bytes that the limits allow now.
  static int64_t allowed() {
    const int64_t room = g_cap.load() - g_live.load();
    const int64_t limit = g_cache_limit.load();
    return room < limit ? (room < 0 ? 0 : room) : limit;
  }

  // Mapped bytes that are in memory now, as the kernel sees them.
  int64_t resident() {
    std::vector<std::pair<uintptr_t, size_t>> ranges;
    {
      const std::lock_guard<std::mutex> guard(mutex);
      ranges.reserve(live_.size() + by_address_.size());
      for (const auto& [start, block] : live_) {
        ranges.emplace_back(start, block.length);
      }
      for (const auto& [start, extent] : by_address_) {
        ranges.emplace_back(start, extent.length);
      }
    }
    int64_t pages = 0;
    std::vector<unsigned char> state;
    for (const auto& [start, length] : ranges) {
      state.assign(length / kPage, 0);
      // A range unmapped by another thread since the snapshot fails here, and is rightly not counted.
      if (mincore(reinterpret_cast<void*>(start), length, state.data()) == 0) {
        for (const unsigned char page : state) {
          pages += page & 1;
        }
      }
    }
    return pages * static_cast<int64_t>(kPage);
  }

  std::mutex mutex;

 private:
  struct Block {
    size_t bytes;
    size_t length;
  };
  struct Extent {
    size_t length;
    uint64_t stamp;  // when it was freed; the oldest goes first
  };

  // Whole huge pages from the kernel; what the caller does not take is cached at once, because touching the block
  // makes the rest of its last huge page resident too.
  uintptr_t map(size_t length) {
    const size_t wanted = round_up(length, kHuge);
    if (wanted < length || wanted > SIZE_MAX - kHuge) {
      return 0;
    }
    const size_t padded = wanted + kHuge;
    void* const raw = mmap(nullptr, padded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) {
      return 0;
    }
    const uintptr_t base = reinterpret_cast<uintptr_t>(raw);
    const uintptr_t start = round_up(base, kHuge);
    if (start > base) {
      munmap(raw, start - base);
    }
    munmap(reinterpret_cast<void*>(start + wanted), base + padded - start - wanted);
    if (g_use_huge_pages.load()) {
      madvise(reinterpret_cast<void*>(start), wanted, MADV_HUGEPAGE);
    }
    g_mapped.fetch_add(static_cast<int64_t>(wanted));
    if (wanted > length) {
      insert(start + length, wanted - length, ++clock_);
      trim(allowed());
    }
    return start;
  }

  void unmap(uintptr_t start, size_t length) {
    if (munmap(reinterpret_cast<void*>(start), length) != 0) {
      // A hole needs one more entry in the kernel's table of mappings, which can be full: the pages go all the same.
      madvise(reinterpret_cast<void*>(start), length, MADV_DONTNEED);
    }
    g_mapped.fetch_sub(static_cast<int64_t>(length));
  }

  void add(uintptr_t start, size_t length, uint64_t stamp) {
    by_address_.emplace(start, Extent{length, stamp});
    by_size_.emplace(length, start);
    by_age_.emplace(stamp, start);
    g_cached.fetch_add(static_cast<int64_t>(length));
  }

  std::map<uintptr_t, Extent>::iterator remove(std::map<uintptr_t, Extent>::iterator at) {
    by_size_.erase({at->second.length, at->first});
    by_age_.erase({at->second.stamp, at->first});
    g_cached.fetch_sub(static_cast<int64_t>(at->second.length));
    return by_address_.erase(at);
  }

  void insert(uintptr_t start, size_t length, uint64_t stamp) {
    auto next = by_address_.lower_bound(start);
    if (next != by_address_.end() && next->first == start + length) {
      length += next->second.length;
      next = remove(next);
    }
    if (next != by_address_.begin()) {
      const auto previous = std::prev(next);
      if (previous->first + previous->second.length == start) {
        start = previous->first;
        length += previous->second.length;
        remove(previous);
      }
    }
    add(start, length, stamp);
  }

  uintptr_t take(uintptr_t start, size_t length) {
    const auto at = by_address_.find(start);
    const Extent extent = at->second;
    remove(at);
    if (extent.length > length) {
      add(start + length, extent.length - length, extent.stamp);
    }
    return start;
  }

  // Unmaps cached extents, oldest first, until at most `target` bytes are cached. Whole huge pages go first: breaking
  // one up would make its live neighbours fault page by page ever after.
  void trim(int64_t target) {
    for (const size_t unit : {kHuge, kPage}) {
      for (auto at = by_age_.begin(); at != by_age_.end() && g_cached.load() > target;) {
        const auto [stamp, start] = *at++;
        const size_t length = by_address_.find(start)->second.length;
        const uintptr_t end = start + length;
        const uintptr_t low = round_up(start, unit);
        uintptr_t high = round_down(end, unit);
        if (low >= high) {
          continue;
        }
        const size_t excess = round_up(static_cast<size_t>(g_cached.load() - target), unit);
        if (high - low > excess) {
          high = low + excess;
        }
        remove(by_address_.find(start));
        unmap(low, high - low);
        if (low > start) {
          add(start, low - start, stamp);
        }
        if (end > high) {
          add(high, end - high, stamp);
        }
      }
    }
  }

  std::unordered_map<uintptr_t, Block> live_;
  std::map<uintptr_t, Extent> by_address_;
  std::set<std::pair<size_t, uintptr_t>> by_size_;
  std::set<std::pair<uint64_t, uintptr_t>> by_age_;
  uint64_t clock_ = 0;
};

// Never destroyed: tensors are still freed while the process shuts down.
PageHeap& heap() {
  static PageHeap* const instance = new PageHeap;
  return *instance;
}

}  // namespace
