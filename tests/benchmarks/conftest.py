"""Benchmarks are run by hand: pytest collects nothing here."""

collect_ignore_glob = ["*.py"]
