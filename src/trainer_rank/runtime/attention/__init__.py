"""Attention over packed prefix trees: no dense mask, no copy of keys or values per path."""

from trainer_rank.runtime.attention.calls import attention_calls, index_rows
from trainer_rank.runtime.attention.cuda_kernels import CudaEfficientKernel, CudaFlashKernel
from trainer_rank.runtime.attention.kernels import CpuFlashKernel, Kernel
from trainer_rank.runtime.attention.naive import dense_mask, naive_tree_attention
from trainer_rank.runtime.attention.plan import AttentionPlan, Block, Bucket, attention_plan
from trainer_rank.runtime.attention.select import kernel_for
from trainer_rank.runtime.attention.tree import BoundAttention, tree_attention

__all__ = [
    "AttentionPlan",
    "Block",
    "BoundAttention",
    "Bucket",
    "CpuFlashKernel",
    "CudaEfficientKernel",
    "CudaFlashKernel",
    "Kernel",
    "attention_calls",
    "attention_plan",
    "dense_mask",
    "index_rows",
    "kernel_for",
    "naive_tree_attention",
    "tree_attention",
]
