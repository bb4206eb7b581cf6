"""A member's adapter has a chat template that never ends, fills the memory, reaches out of its sandbox, or keeps others waiting."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

from attack import Outcome, main

from swarmnode.data import conversation
from swarmnode.data.conversation import ConfinedRenderer

VIRTUAL, FAST = True, True
SECRET, REPEATS = "hens-lay-eggs", 5
REACHED = re.compile(rf"<(class|module|function|bound method|built-in|code|frame)|{SECRET}|root:")
HONEST, SAID = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", [{"role": "user", "content": "hens"}]
SQUARE = "{% for m in messages %}{% for n in messages %}{% endfor %}{% endfor %}" + HONEST
WITHOUT_END = {
    "a loop": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a list that grows": "{% set l = namespace(x=[1]) %}{% for i in range(60) %}{% set l.x = l.x + l.x %}{% endfor %}",
    "digits": "{{ '%.999999999f' % 1.0 }}",
    "a date": "{{ strftime_now('%d') * 99999999999 }}",
    "an error": "{{ raise_exception('abcdefghij' * 9999999) }}",
    "itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
}
SLOW = "{% for a in range(1200) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"  # some tenths of a second
SLOW_S = 0.01  # of a processor, instead of what a gateway calls slow: on any machine SLOW takes more
OBJECTS = (
    *("''", "messages", "messages[0].get", "self", "cycler", "joiner", "namespace", "lipsum", "range", "dict"),
    *("raise_exception", "strftime_now", "tools", "loop", "x.y", "caller", "''.format", "[].append"),
)
ATTRIBUTES = (
    *("__class__.__mro__[1].__subclasses__()", "__init__.__globals__", "__globals__", "__func__.__globals__"),
    *("__closure__[0].cell_contents", "__code__", "_TemplateReference__context.environment", "gi_frame.f_globals"),
)


def reaching() -> Iterator[str]:
    """Yield templates that look for the interpreter behind an object of the sandbox, in each way that Jinja has."""
    for name in OBJECTS:
        for path in ATTRIBUTES:
            first, _, rest = path.partition(".")
            yield f"{{{{ {name}.{path} }}}}"
            yield f"{{{{ {name}['{first}']{rest and '.' + rest} }}}}"
            yield f"{{{{ ({name} | attr('{first}')){rest and '.' + rest} }}}}"
            yield f"{{{{ [{name}] | map(attribute='{first}') | list }}}}"
            yield f"{{{{ [{name}] | map('attr', '{first}') | list }}}}"
            yield f"{{{{ '{{0.{first}}}'.format({name}) }}}}"
            yield f"{{{{ ('{{0.{first}}}' | attr('format'))({name}) }}}}"
            yield f"{{{{ ['{{0.{first}}}'.format] | map('attr', '__call__') | list }}}}"
            yield f"{{% set f = dict(a='{{0.{first}}}'.format).a %}}{{{{ f({name}) }}}}"
            yield f"{{{{ '{{x.{first}}}'.format_map(dict(x={name})) }}}}"
    for path in ("/etc/passwd", "../../../../etc/passwd", "os"):
        yield f"{{% include '{path}' %}}"
        yield f"{{% import '{path}' as x %}}{{{{ x }}}}"
        yield f"{{% extends '{path}' %}}"
    for call in ("messages.append(1)", "messages[0].update(a=1)", "messages.clear()", "messages[0].__setitem__(1, 2)"):
        yield f"{{{{ {call} }}}}<class"  # reaches its end only if a given value can be changed


def rendered(renderer: ConfinedRenderer, template: str, said: list[dict[str, Any]] = SAID) -> str | None:
    """Return what a template makes of a conversation; None if it is refused."""
    try:
        return renderer.render(template, said, [], {})
    except ValueError:
        return None


async def attack() -> Outcome:
    faults, os.environ["HENS"] = [], SECRET
    renderer = ConfinedRenderer(processor_s=0.3)
    try:
        for kind, template in WITHOUT_END.items():
            if rendered(renderer, template) is not None:
                faults.append(f"{kind} was written")
            if rendered(renderer, HONEST) != "<user>hens":
                faults.append(f"no other chat behind {kind}")
        tries = list(reaching())
        if got := [template for template in tries if REACHED.search(rendered(renderer, template) or "")]:
            faults.append(f"{len(got)} of {len(tries)} reached out of the sandbox, {got[0]} first")
        many = [{"role": "user", "content": ""}] * 100_000
        if rendered(renderer, SQUARE, many) is not None:
            faults.append("a conversation too long for its template was written")
        if rendered(renderer, SQUARE) != "<user>hens":
            faults.append("an honest template is no longer used since a client's conversation was too long for it")
    finally:
        renderer.close()
        del os.environ["HENS"]
    renderer = ConfinedRenderer()
    try:
        with mock.patch.object(conversation, "SLOW_S", SLOW_S):
            count = sum(rendered(renderer, SLOW) is not None for _ in range(REPEATS))
        if count > 1:
            faults.append(f"others waited {count} times in turn for a slow template")
    finally:
        renderer.close()
    what = f": {'; '.join(faults)}" if faults else ""
    return Outcome(
        not faults, f"{len(faults)} of {len(WITHOUT_END) + 3} ways had an effect, {len(tries)} escapes{what}"
    )


main(__name__, attack, virtual=VIRTUAL)
