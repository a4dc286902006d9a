"""Archives' databases: one schema and one set of statements for SQLite files and PostgreSQL servers."""
