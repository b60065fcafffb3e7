"""Fuzz campaigns: shards and their watchdog, journals, the corpus from night to night, the ledger, and the result."""
