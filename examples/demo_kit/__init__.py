"""What the three demos share: the servers, the story, the accounts, the table. See ../README.md.

The story is the same for each framework: jobs are scheduled, some are cancelled, the worker's whole process tree is
killed, Redis is killed, and then every job is accounted for.
"""
