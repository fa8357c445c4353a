"""For users' own tests: delayed jobs in memory, on a clock that the test moves."""
