"""Other OpenAI-compatible servers. Imports nothing: programs of its stages start without the table of them."""
