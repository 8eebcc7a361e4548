"""Tests that need a CUDA device; ``scripts/gpu_check.sh`` runs them."""
