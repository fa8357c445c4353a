"""The delay queue's Redis side: keys, scripts, requests, and the two executors."""
