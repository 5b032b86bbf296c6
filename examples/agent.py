"""An agent with two tools, by LangChain, on an OpenAI endpoint of `pipeline serve start CELL --openai`.

pip install 'langchain>=1,<2' 'langchain-openai>=1,<2'
python examples/agent.py --url http://127.0.0.1:8000/v1 "What is the weather where it is noon now, Berlin or Tokyo?"
"""

from __future__ import annotations

import argparse
import os

from langchain.agents import create_agent
from langchain_core.messages import AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

WEATHER = {"Berlin": "18 °C and rain", "Tokyo": "25 °C and sun"}
TIME = {"Berlin": "12:00", "Tokyo": "19:00"}


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return WEATHER.get(city, f"nothing is known of {city}")


@tool
def get_time(city: str) -> str:
    """The local time in a city."""
    return TIME.get(city, f"nothing is known of {city}")


def main() -> None:
    """Ask, show which tools are called, and print the answer as it is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("question")
    given = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "none")
    name = given.model or _first(given.url, key)
    model = ChatOpenAI(base_url=given.url, api_key=key, model=name, temperature=0, stream_usage=True)
    agent = create_agent(model, [get_weather, get_time])
    asked = {"messages": [{"role": "user", "content": given.question}]}
    text = ""
    for message, _ in agent.stream(asked, stream_mode="messages"):
        if isinstance(message, ToolMessage):
            print(f"{text and chr(10)}[{message.name}: {message.content}]")
            text = ""
        elif isinstance(message, AIMessageChunk) and message.content:
            text = str(message.content)
            print(text, end="", flush=True)
    print()


def _first(url: str, key: str) -> str:
    from openai import OpenAI

    with OpenAI(base_url=url, api_key=key) as client:
        return client.models.list().data[0].id


if __name__ == "__main__":
    main()
