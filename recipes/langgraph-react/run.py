"""A LangGraph ReAct agent with a sandbox as its tool, which branches in the middle of its thought.

    python recipes/langgraph-react/run.py [SNAPSHOT]

The agent loads data, then it branches: its sandbox, and LangGraph's thread of messages with it.
Each branch continues the same thought in its own way; the branch with the best fit is promoted.
A list of messages stands in for the model: replace it with any chat model of LangChain.
"""

from __future__ import annotations

import sys

from langchain_core.language_models.fake_chat_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from forkd import Sandbox

LOAD = "xs = list(range(1, 9))\nys = [3 * x * x + 1 for x in xs]\nlen(xs)"

ERROR = "round(sum(abs(model(x) - y) for x, y in zip(xs, ys)), 6)"

IDEAS = {
    "constant": "model = lambda x: sum(ys) / len(ys)",
    "linear": "k = (ys[-1] - ys[0]) / 7\nmodel = lambda x: ys[0] + k * (x - 1)",
    "square": "model = lambda x: 3 * x * x + 1",
}


def python(code: str, config: RunnableConfig) -> str:
    """Run Python in the sandbox of this thread; its names stay for the next call."""
    sandbox = Sandbox.connect(config["configurable"]["sandbox"])
    return str(sandbox.eval(code, check=True))


def calls(code: str) -> AIMessage:
    """Return the message of a model that calls the tool."""
    call = {"name": "python", "args": {"code": code}, "id": "call-1"}
    return AIMessage("", tool_calls=[call])


def agent(*messages: AIMessage, memory: InMemorySaver) -> object:
    """Return a ReAct graph whose model says these messages."""
    model = FakeMessagesListChatModel(responses=list(messages))
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([python]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=memory)


def main(snapshot: str = "numpy") -> dict[str, float]:
    """Return the error of each branch, and of the sandbox that the agent keeps."""
    memory = InMemorySaver()
    with Sandbox(snapshot) as source:
        thread = {"configurable": {"thread_id": "source", "sandbox": source.id}}
        start = agent(calls(LOAD), AIMessage("The data is there. Which curve?"), memory=memory)
        thought = start.invoke({"messages": [("user", "Fit a curve to the data.")]}, thread)

        errors, branches = {}, source.branch(len(IDEAS))
        for (name, code), branch in zip(IDEAS.items(), branches, strict=True):
            thread = {"configurable": {"thread_id": name, "sandbox": branch.id}}
            more = agent(calls(f"{code}\n{ERROR}"), AIMessage(f"A {name} curve."), memory=memory)
            ended = more.invoke(thought, thread)
            errors[name] = float(ended["messages"][-2].content)
            print(len(ended["messages"]), "messages:", ended["messages"][-1].content, errors[name])
        best = list(errors).index(min(errors, key=errors.get))
        branches[best].promote()  # takes the source's id; the other branches end
        return {**errors, "kept": float(str(source.eval(ERROR, check=True)))}


if __name__ == "__main__":
    print(main(*sys.argv[1:2]))
