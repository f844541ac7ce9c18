"""Seeds that once failed, each with what was wrong. They are played for ever after, beside the first two hundred.

What a seed draws changes when a scene can hold something new; then the reason here says what to look for, and the bug
stays covered by a test of the core.
"""

ONCE_FAILED: dict[int, str] = {
    41: "an urgent newcomer called a plan off; the slot that stayed had room, and its queue was not served first",
    28: "granted out of order in its lane; the same repair as for 41 mended it",
    178: "granted out of order in its lane; the same repair as for 41 mended it",
    114: "a wish became late, stood before the request behind it and, since it makes nobody leave, held it up for ever",
    14: "a victim whose sleep had failed was taken for untouched when the store refused room to whom it left for",
    45: "a back-off that was over came back when the clock was set back; planted.py can bring it back",
}
