"""Fetches models: chooses and pins one of a recipe's sources, then downloads and verifies its files as a Hugging Face
directory.

    recipe's sources --resolve--> pinned source (part of the fingerprint) --fetch--> directory

`sources` has both functions. A hub's module (`hugging_face`, `modelscope`) lists the files through the hub's official
client; `transfer` downloads them in the same way from both; `verify` checks the result.
"""
