"""A model's files and tokenizer, for every engine and command that reads them.

files.py      a model's name -> its files          tokenizer.py       text <-> token ids
fetch.py      the default model, fetched once      kept_tokenizer.py  a tokenizer that was opened before
gguf_file.py  what a GGUF file says of itself      reading.py         a model opened to read prompts, not to run
quiet.py      other libraries' noise
"""
