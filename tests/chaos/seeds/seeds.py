"""Seeds that once failed, each with what was wrong. They are played for ever after, beside the first ones.

What a seed draws changes when a scenario can hold something new; then the reason here says what to look for, and the
bug stays covered by a test of the core.
"""

ONCE_FAILED: dict[int, str] = {
    41: "an urgent newcomer called a plan off; the slot that stayed had room, and its queue was not served first",
    28: "granted out of order in its lane; the same repair as for 41 mended it",
    178: "granted out of order in its lane; the same repair as for 41 mended it",
    114: "a preload became late, stood before the request behind it and, since it evicts no model, blocked it for ever",
    14: "a victim whose sleep had failed was taken for untouched when the store refused room for the newcomer",
    249: "a late request stood before an urgent one of its queue, which alone could have made an urgent model leave",
    297: "a late request stood before an urgent one of its queue; the same repair as for 249 mended it",
    320: "under the coordinator a sleeper that had been urgent kept all other models out for good",
    651: "a lease was not recalled for an urgent request that stood behind a late one; the same repair as for 249",
    655: "a lease was not recalled for an urgent request that stood behind a late one; the same repair as for 249",
    206: "a remote model that came served a request whose local model was busy",
    270: "a remote model that came served a request though a local one could be loaded by then",
    5011: "models for which all classes waited closed each other after every request, so that others came twice",
    5142: "the checker took a visit that a higher class had cut short for a whole one",
    45: "a back-off that was over came back when the clock was set back; planted.py can bring it back",
    5160: "a lease was granted the host's memory, planned while the GPUs were gone, after they had come back",
}
