"""The base of every configuration section: frozen, and strict about its keys."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of a recipe. Torch-free; an unknown key is an error that names the nearest known one.

    A section chosen by `kind:` names in `builds` ("module:callable") what `ratchet.build` calls with it, so that a driver
    never imports a backend that it does not run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    builds: ClassVar[str] = ""
