"""Texts that would do harm as a path, in a shell, in a page or in a pattern."""

HOSTILE = {
    "parent": "../../escaped",
    "absolute": "/escaped",
    "quotes": "a'b\"c",
    "newline": "a\ntouch escaped",
    "trailing newline": "tiny\n",
    "long": "a" * 300,
    "substitution": "$(touch escaped)",
    "backticks": "`touch escaped`",
    "semicolon": "x; touch escaped",
    "zero byte": "a\0b",
    "escape": "\x1b[31mred",
    "braces": "{sweep}{0}",
    "markup": "<script>alert(1)</script>",
    "option": "--help",
    "percent": "%s%n",
}
