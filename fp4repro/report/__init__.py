"""Results: one schema, statistics over paired seeds, tables and figures. Knows nothing of torch."""
