"""The languages that clients speak beside OpenAI's chat. Pure functions: nothing here reads, waits or knows a clock.

`neutral.py` is the form between all of them, `chat.py` its OpenAI side; each dialect has files of its own, and
`translation.py` joins the two sides for one request.
"""
