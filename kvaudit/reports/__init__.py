"""Reports: one file a format, each rendering the same Audit."""
