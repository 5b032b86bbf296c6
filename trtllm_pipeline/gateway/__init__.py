"""The OpenAI endpoint in front of served cells: `pipeline gateway`, `pipeline serve start --openai`."""
