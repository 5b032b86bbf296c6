"""Getting models: which of a recipe's sources to use, pinned; and its files, verified, as a Hugging Face folder.

    recipe's sources --resolve--> pinned source (part of the fingerprint) --fetch--> folder

`sources` holds both functions. A hub's module (`hugging_face`, `modelscope`) asks the hub through its official client
which files there are; `transfer` gets them, the same way from both; `verify` looks at what came.
"""
