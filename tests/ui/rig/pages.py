"""The pages of the dashboard: what each is called, and a word of the scene that proves its data have come."""

from __future__ import annotations

from typing import Final

from playwright.sync_api import Page, expect

PAGES: Final[dict[str, tuple[str, str]]] = {
    "stage": ("Stage", "qwen3-14b"),
    "queue": ("Queue", "qwen3-coder-30b"),
    "requests": ("Requests", "qwen3-14b"),
    "leases": ("Leases", "blender"),
    "timeline": ("Timeline", "qwen3-14b"),
    "decisions": ("Decisions", "mistral-7b"),
    "playground": ("Playground", "phi-4-mini"),
    "tasks": ("Tasks and downloads", "Qwen/Qwen3-4B"),
    "simulate": ("Simulate", "Nothing was played yet"),
    "versions": ("Versions", "tiny-chat-v2"),
    "tenants": ("Tenants and limits", "website"),
    "config": ("Config", "memory.look_every_s"),
    "metrics": ("Metrics", "Requests"),
}


def ready(shown: Page, page: str) -> None:
    """Return when the page shows what the gateway says."""
    title, proof = PAGES[page]
    expect(shown.get_by_role("heading", name=title, level=1)).to_be_visible()
    expect(shown.locator("#main").get_by_text(proof).first).to_be_attached()
