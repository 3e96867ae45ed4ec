"""Resolve sections by their `kind:`, a built-in name or an import path such as `my_pkg.maze:Maze`.

A path needs no registry entry, and only the configuration of the named kind is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, get_args, get_type_hints

from pydantic import AfterValidator, Field, GetCoreSchemaHandler, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from ratchet.config.base import Section
from ratchet.config.peer_names import find_reward_kind
from ratchet.config.registry import BASES, DEFAULT_KIND, KINDS
from ratchet.config.sections import USER_SECTION_ATTRIBUTES
from ratchet.errors import ConfigError
from ratchet.utils.terminal_text import escape_surrogates
from ratchet.utils.user_imports import import_object


def _check_ignored(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name in ("model", "messages", "input", "tools", "stream"):
            raise ValueError(f"{name} can't be ignored: the answer depends on it")
    return names


# Keys that every section of a slot has, whatever its kind.
SLOT_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "rewards": {
        "weight": (float, Field(1.0, description="Factor of this reward in the sum of rewards."))
    },
    "estimator": {
        "weight": (
            float,
            Field(1.0, description="Factor of this estimator in the sum of estimators."),
        )
    },
    "agent": {
        "ignore": (
            Annotated[tuple[str, ...], AfterValidator(_check_ignored)],
            Field(
                (),
                description="Fields of the agent's requests that are ignored; without this key, "
                "such a field is an error: [temperature, response_format].",
            ),
        ),
        "host": (
            str,
            Field(
                "127.0.0.1",
                description="Address on which the server of the attempts listens. 0.0.0.0 lets "
                "agents in containers and on other machines call it; each agent needs the key of "
                "its attempt.",
            ),
        ),
        "public_host": (
            str | None,
            Field(
                None,
                description="Host name in the base URL that agents get, such as "
                "host.docker.internal; null: the value of host.",
            ),
        ),
    },
    "part": {
        "weight": (
            float,
            Field(1.0, gt=0, description="Share of the prompts, relative to the other parts."),
        ),
        "tag": (str, Field("", description="Tag of this part's tasks; default: its kind.")),
        "chat_template_kwargs": (
            dict[str, Any],
            Field(
                {},
                description="Variables of the chat template for this part's tasks: "
                "{reasoning_effort: low}. A row's own variables (chat_template_columns) override "
                "them.",
            ),
        ),
    },
}


def resolve(slot: str, values: Mapping[str, Any]) -> Any:
    """Return the section of a `slot` ("algorithm", ...) from a recipe's mapping.

    The section has the attributes of the slot's base section (`BASES`).

    Raises ConfigError for an unknown or unusable kind, pydantic's ValidationError for wrong values.
    """
    return section_class(slot, read_kind(slot, values)).model_validate(dict(values))


def read_kind(slot: str, values: Mapping[str, Any]) -> str:
    """Return a section's `kind`, or the default of its slot. Raises ConfigError without one."""
    kind = values.get("kind", DEFAULT_KIND.get(slot))
    if kind is None:
        raise ConfigError(
            f"is missing; set it to one of {', '.join(KINDS[slot])}, or to a path such as "
            "my_pkg.module:Class"
        )
    if not isinstance(kind, str):
        raise ConfigError(f"{kind!r} is not a name")
    return kind


@cache
def section_class(slot: str, kind: str) -> type[Section]:
    """Return the class that validates a section of this kind.

    If the class has no field `kind`, it gets one, so that a saved section names its kind. It also
    gets the attributes of the slot's base section that it lacks.
    """
    if ":" in kind:
        target_class = _section_from_path(slot, kind)
        _require_methods(slot, kind)
    elif kind in KINDS[slot]:
        target_class = import_object(KINDS[slot][kind])
    else:
        raise ConfigError(_explain_unknown_kind(slot, kind))
    missing = {
        name: spec
        for name, spec in SLOT_FIELDS.get(slot, {}).items()
        if name not in target_class.model_fields
    }
    if "kind" not in target_class.model_fields:
        missing["kind"] = (Literal[kind], kind)
    base = import_object(BASES[slot]) if slot in BASES else Section
    if not missing and issubclass(target_class, base):
        return target_class
    completed = create_model(
        target_class.__name__,
        __base__=target_class,
        __doc__=target_class.__doc__,
        __module__=target_class.__module__,
        **missing,
    )
    if not issubclass(completed, base):
        _add_base_attributes(completed, base, USER_SECTION_ATTRIBUTES.get(slot, {}))
    return completed


def _add_base_attributes(
    section: type[Section], base: type[Section], replacements: Mapping[str, Any]
) -> None:
    """Give a user's section class the attributes of its slot's base that the class lacks.

    They are copied, because a second base class would hide some of the class's own attributes.

    Args:
        section: The class. It is changed in place, so nothing else may use it yet.
        base: The base section of the slot.
        replacements: Values that take precedence over the base's (`USER_SECTION_ATTRIBUTES`).
    """
    inherited = {
        name: value
        for parent in reversed(base.__mro__)
        if issubclass(parent, Section) and parent is not Section
        for name, value in vars(parent).items()
        if not name.startswith(("_", "model_"))
    }
    for name, value in {**inherited, **replacements}.items():
        if name not in section.model_fields and not hasattr(section, name):
            setattr(section, name, value)


def add_slot_keys(slot: str, section: Section) -> Section:
    """Add the slot's keys to a section made in Python, so that its dump can be loaded again."""
    section_type = type(section)
    path = f"{section_type.__module__}:{section_type.__qualname__}"
    known_kind = next((kind for kind, known in KINDS[slot].items() if known == path), path)
    kind = section.kind_name or known_kind
    expected = section_class(slot, kind)
    return section if isinstance(section, expected) else expected.model_validate(dict(section))


def build(section: Section, /, *arguments: Any, **named: Any) -> Any:
    """Import the factory named by the section's `builds` and call it with the section.

    Further arguments are passed on.
    """
    factory = import_object(section.builds or section.kind_name)
    return factory(section, *arguments, **named)


def _explain_unknown_kind(slot: str, kind: str) -> str:
    near = get_close_matches(kind, KINDS[slot], n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    example = f"; name a class of your own by its path, my_pkg.module:Class{_suggest_path(kind)}"
    return f"'{kind}' is unknown: {hint}the kinds are {', '.join(KINDS[slot])}{example}"


def _suggest_path(kind: str) -> str:
    module, _, name = kind.rpartition(".")
    return f" (did you mean {module}:{name}?)" if module else ""


# --- kinds given by import path

# Methods that an environment class in these slots must have (`ratchet.protocols`). They can't be
# checked for a function, because it has not returned its object yet.
METHODS: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("environment", "part", "worker_environment"), ("tasks", "reset", "step", "close")
)


def _section_from_path(slot: str, kind: str) -> type[Section]:
    """Return the section class of a kind that is an import path.

    It is the section that the path names, the `Config` of the class or function that it names, or
    a section made from the signature. Raises ConfigError for anything else.
    """
    target = import_object(kind)
    if _is_section(target):
        if not target.builds:
            raise ConfigError(
                f"'{kind}' is a section that names nothing to build: set builds = "
                "'my_pkg.module:Class' in it, or name that class"
            )
        return target
    if not callable(target):
        raise ConfigError(f"'{kind}' is neither a class nor a function")
    if slot == "tool" and inspect.isfunction(target) and not _makes_tools(target):
        return FunctionToolSection
    config = getattr(target, "Config", None)  # a user's class or function may have none
    if config is None:
        return _section_from_signature(slot, kind, target)
    if not _is_section(config):
        raise ConfigError(f"{kind}.Config must derive from ratchet.config.base.Section")
    return config


def _makes_tools(function: Callable[..., Any]) -> bool:
    """True if the function's annotation says that it returns tools; False if it is a tool."""
    try:
        annotation = get_type_hints(function).get("return")
    except (NameError, TypeError):
        return False
    return any(hasattr(part, "call") for part in (annotation, *get_args(annotation)))


def _require_methods(slot: str, kind: str) -> None:
    """Raise ConfigError for a class that lacks the methods of its slot."""
    target = import_object(kind)
    if inspect.isclass(target) and not _is_section(target):
        missing_methods = [name for name in METHODS.get(slot, ()) if not hasattr(target, name)]
        if missing_methods:
            raise ConfigError(
                f"'{kind}' is not an environment: the class has no {', '.join(missing_methods)}"
            )


def _is_section(target: Any) -> bool:
    return inspect.isclass(target) and issubclass(target, Section)


class SignatureSection(Section):
    """A section made from the signature of a user's class or function that has no `Config`.

    Its fields are the parameters, which are passed by name.
    """

    builds: ClassVar[str] = "ratchet.config.resolve:build_from_signature"
    target: ClassVar[str] = ""
    """The import path of the class or function."""
    parameters: ClassVar[frozenset[str]] = frozenset()
    """The names of the parameters that are keys of the section."""
    binds: ClassVar[bool] = False
    """True if building the section binds the parameters and returns the target; False if it calls
    the target."""


class FunctionToolSection(Section):
    """A section of a plain function that is a tool. It has no keys: its kind names the function."""

    builds: ClassVar[str] = "ratchet.environments.tool_use.function_tool:build_function_tool"


def build_from_signature(section: SignatureSection, *context: Any, **named: Any) -> Any:
    """Call the section's target with the section's values, or bind them to it.

    `context` and `named`, which `build` passes to every factory, are ignored.
    """
    values = {name: getattr(section, name) for name in section.parameters}
    target = import_object(section.target)
    return partial(target, **values) if section.binds else target(**values)


# Slots whose import path may name a plain function, with the number of positional arguments that
# Ratchet passes to the function. Its other parameters are keys of the section.
FUNCTION_ARGUMENTS = {
    "rewards": 2,
    "advantage": 2,
    "estimator": 2,
    "policy_loss": 2,
    "shaping": 2,
    "agent": 3,
    "group_filter": 1,
}


def _section_from_signature(slot: str, kind: str, target: Callable[..., Any]) -> type[Section]:
    """Return a section class whose keys are the parameters of a class or function."""
    binds = slot in FUNCTION_ARGUMENTS and inspect.isfunction(target)
    annotated = target.__init__ if inspect.isclass(target) else target
    try:
        hints = get_type_hints(annotated, include_extras=True)
        parameters = list(inspect.signature(target).parameters.values())[
            FUNCTION_ARGUMENTS[slot] if binds else 0 :
        ]
    # Objects written in C, for example, may have no signature.
    except (NameError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"the annotations of '{kind}' can't be read: {error}") from error
    if len(parameters) == 1 and _is_section(hints.get(parameters[0].name)):
        return hints[parameters[0].name]
    if slot == "rewards" and binds and (library := find_reward_kind(target)):
        raise ConfigError(
            f"'{kind}' has the parameters of a reward function of another library: write "
            f'{{kind: {library}, function: "{kind}"}}'
        )
    fields: dict[str, Any] = {}
    for parameter in parameters:
        if parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
            parameter.POSITIONAL_ONLY,
        ):
            raise ConfigError(
                f"'{kind}' takes '{parameter}', which can't be a key: use named parameters, or add "
                "a `Config`"
            )
        if (
            parameter.name == "kind"
            or hasattr(Section, parameter.name)
            or parameter.name in SLOT_FIELDS.get(slot, {})
        ):
            raise ConfigError(
                f"the parameter '{parameter.name}' of '{kind}' is a key that every section has: "
                "rename it"
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints.get(parameter.name, Any), default)
    try:
        section = create_model(kind.partition(":")[2], __base__=SignatureSection, **fields)
    except (PydanticSchemaGenerationError, PydanticUserError, NameError) as error:
        raise ConfigError(
            f"the parameters of '{kind}' can't be read from YAML ({error}): give it a `Config`"
        ) from error
    section.target = kind
    section.parameters = frozenset(fields)
    section.binds = binds
    return section


# --- schema fields whose section is chosen by `kind:`


@dataclass(frozen=True)
class Slot:
    """An annotation of a field whose section is chosen by `kind:`."""

    name: str
    is_list: bool = False  # the field is a list of sections
    is_optional: bool = False  # null is allowed

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.validate, handler(source))

    def validate(self, value: Any) -> Any:
        """Return the field's section or sections. Called before pydantic validates the field."""
        if value is None and self.is_optional:
            return None
        if not self.is_list:
            return self._validate_one(value)
        if not isinstance(value, list | tuple):
            raise PydanticCustomError("no_list", "must be a list of sections, each with its kind")
        sections: list[Any] = []
        errors: list[InitErrorDetails] = []
        for index, item in enumerate(value):
            try:
                sections.append(self._validate_one(item))
            except (ValidationError, PydanticCustomError) as error:
                errors += _prefix_location(error, index)
        if errors:
            raise ValidationError.from_exception_data(self.name, errors)
        return tuple(sections)

    def _validate_one(self, value: Any) -> Any:
        """Return the section of a mapping, or of a section made in Python.

        Errors are raised with the location of the key that is wrong.
        """
        if isinstance(value, Section):
            return add_slot_keys(self.name, value)
        if not isinstance(value, Mapping):
            kind = value if isinstance(value, str) else next(iter(KINDS[self.name]))
            # pydantic writes messages as UTF-8, which can't encode half a surrogate pair
            example = f"{{kind: {escape_surrogates(kind)}}}"
            raise PydanticCustomError(
                "no_section",
                "must be a section with its kind, such as {example}",
                {"example": example},
            )
        try:
            return resolve(self.name, value)
        except ConfigError as error:
            reason = PydanticCustomError(
                "kind", "{reason}", {"reason": escape_surrogates(str(error))}
            )
            raise ValidationError.from_exception_data(
                self.name, [InitErrorDetails(type=reason, loc=("kind",), input=value.get("kind"))]
            ) from error


def _prefix_location(
    error: ValidationError | PydanticCustomError, index: int
) -> list[InitErrorDetails]:
    """Return the errors of one list item, with its index prepended to their locations."""
    if isinstance(error, PydanticCustomError):
        return [InitErrorDetails(type=error, loc=(index,), input=None)]
    prefixed = []
    for detail in error.errors():
        context = {**detail.get("ctx", {}), "message": detail["msg"]}
        kind: Any = detail["type"]
        reason = PydanticCustomError(kind, "{message}", context)
        place = (index, *detail["loc"])
        prefixed.append(InitErrorDetails(type=reason, loc=place, input=detail["input"]))
    return prefixed
