"""Codes and numbers as sentences, the same in every format; a module for each thing that is spoken of."""
