"""Benchmarks: each measures hpcddp beside the least that anybody would need for the same."""
