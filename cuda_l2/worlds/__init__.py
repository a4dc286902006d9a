"""Recorded worlds: what many schedules of many tasks gave on one machine, in one Parquet file."""
