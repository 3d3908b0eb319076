"""PostgreSQL's own test suites as load: run on a primary, then replayed by stock PostgreSQL and by Walrider."""
