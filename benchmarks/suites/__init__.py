"""One module for each table of benchmarks/run.py; a new file here is a new table."""
