"""Wikipedia markup -> plain text: the prose of articles, case, punctuation and Unicode kept."""

import html
import re
from collections.abc import Callable, Iterator


def read_articles(raw: bytes, decode: Callable[[bytes, int], str]) -> Iterator[tuple[str, str]]:
    """Titles and prose of the articles in a Wikipedia dump; redirects and other namespaces are left out.

    `decode` turns bytes that begin at an offset of the dump into text.
    """
    for page in _PAGE.finditer(raw):
        title = html.unescape(decode(page[1], page.start(1)))
        body = page[2] or b""
        if page[3] == b"":
            # The file ends inside this article: keep its whole lines.
            body = body[: body.rfind(b"\n") + 1]
        if not _REDIRECT.match(body) and not _NAMESPACE.match(title):
            yield title, strip_markup(decode(body, page.start(2)))


_PAGE = re.compile(rb"<title>(.*?)</title>.*?<text[^<>]*?(?:/>|>(.*?)(</text>|\Z))", re.DOTALL)
_REDIRECT = re.compile(rb"\s*#redirect", re.IGNORECASE)
_NAMESPACE = re.compile(r"(?:Talk|User|Wikipedia|Image|MediaWiki|Template|Help|Category|Portal)(?: talk)?:")


def strip_markup(wikitext: str) -> str:
    """Prose of one article as it stands in the XML: no code, formulas, media, tables, templates, notes or tags."""
    text = wikitext.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", '"').replace("&amp;", "&")
    text = _DROPPED.sub("", text)
    for innermost in (_TEMPLATE, _TABLE):
        found = 1
        while found:
            text, found = innermost.subn("", text)
    found = 1
    while found:
        text, found = _LINK.subn(_show_link, text)
    for pattern, shown in _REWRITES:
        text = pattern.sub(shown, text)
    text = html.unescape(text).replace("\xa0", " ")
    text = re.sub(r"[ \t]{2,}|\t", " ", text).replace(" \n", "\n").replace("\n ", "\n")
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def _show_link(match: re.Match[str]) -> str:
    """What a reader sees of a link: its label, or nothing for media, categories and other languages."""
    inside, label = match.groups()
    if inside is None:
        return label
    if _UNSEEN.match(inside):
        return ""
    target, _, label = inside.partition("|")
    return label or target.lstrip(": ")


# Patterns for what nests find the innermost one, and are used until none is left.
_DROPPED = re.compile(
    r"<!--.*?(?:-->|\Z)"
    r"|<(ref|math|code|pre|source|gallery|timeline|hiero|table)\b[^<>]*?(?:/>|>.*?</\1\s*>)",
    re.DOTALL | re.IGNORECASE,
)
_TEMPLATE = re.compile(r"\{\{(?:[^{}]|\{(?!\{)|\}(?!\}))*+\}\}")
_TABLE = re.compile(r"^[ \t:]*\{\|.*\n(?:(?![ \t:]*(?:\{\||\|\})).*\n)*+[ \t:]*\|\}", re.MULTILINE)
_LINK = re.compile(
    r"\[\[((?:[^\[\]]|\[(?!\[)|\](?!\]))*+)\]\]"
    r"|\[(?:(?:https?|ftp|irc|gopher)://|mailto:|news:)[^\s\[\]]*[ \t]*([^\[\]\n]*)\]",
    re.IGNORECASE,
)
_UNSEEN = re.compile(r"\s*(?i:image|file|media|category)\s*:|\s*(?:[a-z]{2,3}(?:-[a-z-]+)?|simple|tokipona)\s*:")
_REWRITES = [
    (re.compile(pattern, re.MULTILINE), shown)
    for pattern, shown in [
        (r"^ .*$", ""),  # Set as it stands: program text, drawings, columns.
        (r"''+", ""),
        (r"<sup>(?<=[\d)]<sup>|\b\w<sup>)(?=[-−+\d])", "^"),  # Ten to the sixth is not 106.
        (r"(?i)</?(?:br|p|div|li|ul|ol|dl|dd|dt|tr|td|th|hr|blockquote|center|h[1-6])\b[^<>]*>", "\n"),
        (r"</?[a-zA-Z][^<>]*>", ""),
        (r"^(?:\{?\||\[\[(?i:image|file|media|category):).*$", ""),  # Left of what was never closed.
        (r"([{}\[\]])\1|__[A-Z]+__", ""),
        (r"^=+[ \t]*(.*?)[ \t]*=+[ \t]*$", r"\1"),
        (r"^(?:[*#:;]+[ \t]*|-{4,})", ""),
        (r"\([\s,;:]*\)", ""),  # Left of brackets that held a template only.
    ]
]
