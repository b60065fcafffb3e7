"""From evidence to a verdict: events, statistics, gates, pages and the command line."""
