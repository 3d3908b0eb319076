"""Benchmarks that put Walrider beside stock PostgreSQL."""
