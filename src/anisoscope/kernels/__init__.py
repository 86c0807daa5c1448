"""The arithmetic that must be fast and right. Each function has a float64 reference in tests/test_kernels.py."""
