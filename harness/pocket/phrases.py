"""Fixed strings of the pocket world's prompts and answers that the tokenizer keeps in one piece.

All other text is one token a character. A tokenizer of words would make reading a matter of
guessing words; whole template phrases, which carry nothing to read, only make prompts long.
"""

from __future__ import annotations

PHRASES: tuple[str, ...] = (
    # Chat turns.
    "user\n",
    "assistant\n",
    "system\n",
    # Text in pictures.
    "what is written in the image?",
    "图中写了什么？",
    "what is the ",
    "是什么？",
    " in row ",
    "行的",
    # Multiple choice; the frame is the published prompt.
    "Question: ",
    "\nOptions:\nA. ",
    "\nB. ",
    "\nC. ",
    "\nD. ",
    "\nPlease select the correct answer from the options above. \n",
    "what is at the ",
    "how many ",
    " are there?",
    "what colour is the ",
    "where is the ",
    "有几个",
    "是什么颜色？",
    "在哪里？",
    # Notes with pictures.
    "how do I fix the ",
    "怎么做",
    "DOC#",
    "(IMG#",
    "![",
    "](IMG#",
    " step ",
    ": ",
    "步：",
    # Appended, so that no other id moves.
    "what is written in the images?",
    " steps: ",
)
"""No phrase may begin inside another's end in text that the world composes; a test checks it."""
