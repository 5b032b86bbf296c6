"""Other OpenAI-compatible servers that speak OpenAI's API. Nothing is imported here: programs of its stages are started without the table of them."""
