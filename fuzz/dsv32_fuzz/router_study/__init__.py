"""What bf16 does to the routers of a checkpoint: read only the gates, route tokens at both precisions, count."""
