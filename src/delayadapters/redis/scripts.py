"""Loading the Lua scripts: one file an operation, shared pieces in ``lua/include``.

A script's head names its keys and arguments; the ``local`` statements that bind them are generated from the head, and
:meth:`Script.bind` fills them by name, so an index cannot drift::

    -- keys: due entries
    -- args: now id rest...
    -- include: clock entries

``rest...`` binds ``rest_at``, the index in ARGV of the first of any number of further arguments.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from .keys import ShardKeys

__all__ = ["Script", "commands_of", "load", "names"]

_HEAD = re.compile(r"^-- (keys|args|include):(.*)$", re.MULTILINE)
_CALLED = re.compile(r"redis\.p?call\('([A-Z]+)'")
_OPTIONAL = {"EXISTS", "HINCRBY", "PUBLISH"}
"""A lost PUBLISH costs at most the safety poll, a lost HINCRBY a number in the metrics; EXISTS is for jobs and adapters
that ask for it."""
_RIGHTS = """\
if redis.acl_check_cmd then
  for _, name in ipairs({ NAMES }) do
    if not redis.acl_check_cmd(name, KEYS[1]) then
      return redis.error_reply("NOPERM this user may not run '" .. name .. "'; nothing was changed")
    end
  end
end"""


@dataclass(frozen=True, slots=True)
class Script:
    """A script ready to be sent: its text, SHA1 and the names its head declares."""

    name: str
    text: bytes
    sha: bytes
    key_names: tuple[str, ...]
    arg_names: tuple[str, ...]
    variadic: bool

    def bind(
        self, keys: ShardKeys, rest: Iterable[bytes] = (), /, **args: bytes | str | int
    ) -> tuple[list[bytes], list[bytes]]:
        """KEYS and ARGV in the order the head declares.

        Raises:
            TypeError: an argument is missing, or not in the head.
        """
        if args.keys() != set(self.arg_names):
            raise TypeError(f"{self.name}.lua takes {self.arg_names}, got {tuple(args)}")
        argv = [_raw(args[name]) for name in self.arg_names]
        if self.variadic:
            argv.extend(rest)
        return [getattr(keys, name) for name in self.key_names], argv


def _raw(value: bytes | str | int) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@cache
def load(name: str, package: str = "delayadapters.redis") -> Script:
    """The script ``lua/<name>.lua`` of a package (an adapter's, to run beside a queue) with the core's includes."""
    folder = resources.files("delayadapters.redis") / "lua"
    body = (resources.files(package) / "lua" / f"{name}.lua").read_text("utf-8")
    head: dict[str, list[str]] = {"keys": [], "args": [], "include": []}
    for kind, words in _HEAD.findall(body):
        head[kind] += words.split()
    args = head["args"]
    variadic = bool(args) and args[-1].endswith("...")
    lines = [f"local {key} = KEYS[{i}]" for i, key in enumerate(head["keys"], 1)]
    lines += [f"local {arg} = ARGV[{i}]" for i, arg in enumerate(args[: len(args) - variadic], 1)]
    if variadic:
        lines.append(f"local {args[-1][:-3]}_at = {len(args)}")
    parts = [_strip((folder / "include" / f"{piece}.lua").read_text("utf-8")) for piece in head["include"]]
    parts.append(_strip(body))
    text = "\n".join([*lines, _rights(parts), *parts]).encode()
    return Script(
        name,
        text,
        hashlib.sha1(text, usedforsecurity=False).hexdigest().encode(),
        tuple(head["keys"]),
        tuple(args[: len(args) - variadic]),
        variadic,
    )


def _rights(parts: Iterable[str]) -> str:
    """Refuses at once what an ACL user may not do in full: Redis does not roll a script back.

    Redis 6.2 has no ``acl_check_cmd``; there a script of a user who lacks a command can end half way.
    """
    used = sorted({name for part in parts for name in _CALLED.findall(part)} - _OPTIONAL)
    names = ", ".join(f"'{name}'" for name in used)
    return _RIGHTS.replace("NAMES", names)


@cache
def names() -> tuple[str, ...]:
    """Every script of the core."""
    folder = resources.files("delayadapters.redis") / "lua"
    return tuple(sorted(file.name[:-4] for file in folder.iterdir() if file.name.endswith(".lua")))


def commands_of(name: str) -> frozenset[str]:
    """The Redis commands, in lower case, that a script of the core runs; those of jobs' own releases excepted."""
    return frozenset(word.lower() for word in _CALLED.findall(load(name).text.decode()))


def _strip(source: str) -> str:
    """Without comment lines: the server keeps the text of every script it has seen."""
    return "\n".join(line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("--"))
