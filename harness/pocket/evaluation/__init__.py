"""What `harness.pocket.evaluate` asks, and what it makes of the answers: no engine, no files."""
