"""Its place puts tests/ on the import path, so that test modules in folders find the shared builders here."""
