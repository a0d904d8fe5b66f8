"""All messages say the same thing in the same words."""

import re

import messages
import pytest

# Words that no message has -> the usual ones.
OTHER_WORDS = {
    r"\badmins?\b": "administrators",
    r"\bgo(es)? on\b": "continue",
    r"\bwhoever\b|\bnobody\b": "name the actor",
    r"\bfor nothing\b": "useless",
    r"\bin vain\b": "gave up",
    r"\bfor ever\b": "without end",
    r"\bmend\b": "fix",
    r"\bcontradicts?\b": "conflicts with",
    r"\btruth value\b": "boolean",
    r"\bat the begin\b": "at the beginning",
    r"\b1 (nodes|ranks|GPUs|processes|steps|attempts|runs)\b": "one of each",
    r"\bextra `\w+`(?! of hpcddp: pip install)": "errors.install_extra",
}


@pytest.mark.parametrize("words", OTHER_WORDS)
def test_no_message_has_another_word_for_the_same_thing(words: str) -> None:
    rows = messages.all_messages().items()
    assert [f"{place}: {text}" for text, place in rows if re.search(words, text)] == []


def test_the_messages_are_read_from_the_code() -> None:
    texts = messages.all_messages()
    for text in (
        "error: {}",
        "fix the option or the job file",  # an argument of an error
        "held by you; release it with scontrol release {id}",  # of a table
        "Show the nodes that your runs had trouble with",  # the help of a command
    ):
        assert any(text in message for message in texts), text
    assert "Where the messages" not in " ".join(texts)
