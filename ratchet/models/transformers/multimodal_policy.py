"""Policies over multimodal models of transformers, which read images, audio or videos.

A medium has placeholder tokens in its sequence. Embeddings from an encoder (tower) replace them.
T = packed tokens, N = sequences, L = longest sequence, d = hidden size, R = axes of a position.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForMultimodalLM, PreTrainedConfig, PreTrainedModel

from ratchet.config.media_limits import PROCESSOR_FILES
from ratchet.errors import ModelError
from ratchet.models.flops import TokenCost
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.media import EncodedMedia, join_media_inputs, make_probe_images
from ratchet.models.transformers.backbone_inputs import BackboneInputs, MediaInputs
from ratchet.models.transformers.language_inputs import divide_language_inputs
from ratchet.models.transformers.loading import (
    load_config,
    refuse_missing_weights,
    translate_errors,
    without_dropout,
)
from ratchet.models.transformers.media_positions import compute_rope_positions
from ratchet.models.transformers.modules import find_largest_module_list
from ratchet.models.transformers.policy import TransformersPolicy
from ratchet.models.transformers.probe import is_close, make_image_rows
from ratchet.models.transformers_settings import read_setting
from ratchet.models.weights.hf_weights import SavableTensor
from ratchet.types import MediaKind, Medium, PlacedMedium
from ratchet.utils.atomic_files import atomic_path

# Kinds of media that are encoded before the forward, if the backbone accepts encoder outputs.
SEPARATELY_ENCODED: tuple[MediaKind, ...] = ("image", "video")
# The token type ids of transformers for placeholders of media; 0 is text.
MEDIA_TYPES: Mapping[MediaKind, int] = {"image": 1, "video": 2, "audio": 3}

Media = Sequence[Sequence[PlacedMedium]]  # the media of each sequence


class MultimodalPolicy(TransformersPolicy):
    """A policy over a multimodal model of transformers.

    A medium that several sequences of a forward share is encoded once, if the backbone accepts
    encoder outputs. Positions of three axes (M-RoPE) are computed for each sequence separately, so
    that packing does not change them. An additional row of text positions separates packed
    sequences.

    Args:
        train_encoders: True to train the parameters outside of the language model too.
    """

    # Media have masks of their own.
    may_pack_by_lengths = False

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        saved_config: PreTrainedConfig | None = None,
        train_encoders: bool = False,
        probes: Sequence[Medium] = (),
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        """Wrap a loaded model. Raises ModelError if its outputs can't be reproduced.

        Args:
            probes: Two images for the test that packed sequences with media are independent.
                Without probes each sequence runs alone.
            files: The contents of the processor's files by name, which `save` writes too.
        """
        self.train_encoders = train_encoders
        self.files = dict(files or {})
        # Sequences are packed into one forward, unless the checks below find a difference.
        self.packs = True
        super().__init__(model, saved_config=saved_config)
        self.probe_images = tuple(probes)
        self.packs = self.packs and len(probes) > 1 and self._keeps_media_apart(probes)
        if probes:
            self._check_media(probes)
        if not train_encoders:
            self.frozen_parameters = frozenset(f"model.{n}" for n, _ in self.tower_parameters())
        self.requires_grad_(True)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        train_encoders: bool = False,
        hf: Mapping[str, Any] | None = None,
    ) -> Self:
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        with translate_errors(directory, "a model of images and text"):
            saved = load_config(directory, hf, trust_remote_code=trust_remote_code)
            config = without_dropout(saved)
            model, loading = AutoModelForMultimodalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
            refuse_missing_weights(directory, loading)
        files = {
            name: (directory / name).read_bytes()
            for name in PROCESSOR_FILES
            if (directory / name).is_file()
        }
        probes = make_probe_images(directory, model) if files else []
        policy = cls(
            model, saved_config=saved, train_encoders=train_encoders, probes=probes, files=files
        )
        # The constructor's probes run on the CPU in float32: see `TransformersPolicy.load`.
        nn.Module.to(model, device)
        return policy

    def save(self, directory: Path, weights: Mapping[str, SavableTensor] | None = None) -> None:
        super().save(directory, weights)
        for name, content in self.files.items():
            with atomic_path(directory / name) as temporary:
                temporary.write_bytes(content)

    @property
    def reads_media(self) -> bool:
        return True

    @property
    def token_cost(self) -> TokenCost | None:
        """Return None: the cost of encoders depends on each medium."""
        return None

    def find_backbone(self, model: PreTrainedModel) -> str:
        path = model.base_model_prefix
        if not path or model.base_model is model:
            raise ModelError(f"{type(model).__name__} has no backbone separate from its head")
        return path

    @property
    def language(self) -> PreTrainedModel:
        """The language model inside the backbone, which has no head."""
        return self.model.get_decoder()

    @cached_property
    def language_path(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        language = self.language
        return next(path for path, module in self.backbone.named_modules() if module is language)

    @property
    def n_feature_layers(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        vision = read_setting(self.model.config, "vision_config")
        return len((vision and read_setting(vision, "deepstack_visual_indexes")) or ())

    def layers(self) -> list[nn.Module]:
        return find_largest_module_list(self.language)

    # --- trained parameters

    def tower_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) of all parameters outside the language model and its head."""
        language_ids = {id(p) for p in self.language.parameters()}
        return [
            (name, p)
            for name, p in self.model.named_parameters()
            if id(p) not in language_ids and name != self.head_name
        ]

    def merge(self) -> None:
        super().merge()
        self.requires_grad_(True)

    # --- the forward

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
        media: Media = (),
        *,
        output_mask_T: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [T, d], of the tokens that `split_context` gives to this rank.

        media: the media of each sequence, in order; () if no sequence has media.
        """
        assert routing is None, "router replay does not support transformers models"
        assert sum(lengths) == len(tokens_T), (
            f"{sum(lengths)} tokens in `lengths`, {len(tokens_T)} in `tokens_T`"
        )
        media = media or [()] * len(lengths)
        if self.packs:
            packed = self.pack_inputs(tokens_T, positions_T, lengths, media=media)
            return self.add_zero_gradients(self._run_packed(packed))
        n_unread = self.count_unread_rows(len(lengths))
        rows = zip(
            tokens_T.split(list(lengths)), positions_T.split(list(lengths)), media, strict=True
        )
        hidden_by_row = [
            self.run_backbone(
                self.pack_inputs(tokens, positions, [len(tokens)], media=[sequence_media])
            )
            for tokens, positions, sequence_media in rows
        ]
        hidden_by_row += self.run_unread_rows(n_unread)
        return self.add_zero_gradients(torch.cat(hidden_by_row))

    def _run(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return the hidden states of a text without media."""
        return self.run_backbone(self.pack_inputs(tokens_T, positions_T, [len(tokens_T)]))

    def pack_inputs(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
        media: Media = (),
    ) -> MediaInputs:
        """Return the backbone's inputs for packed sequences; arguments as in `hidden`.

        Positions are those of whole sequences. A context-parallel rank gets those of its tokens.
        """
        media = media or [()] * len(lengths)
        types_T = torch.zeros_like(tokens_T)
        for placed, end, length in zip(media, accumulate(lengths), lengths, strict=True):
            self._mark_media(types_T[end - length : end], tokens_T[end - length : end], placed)
        positions_RT = self._compute_position_ids(tokens_T, positions_T, types_T, lengths, media)
        split = self.split_context(lengths)
        index = None if split is None else torch.from_numpy(split.tokens).to(tokens_T.device)
        return MediaInputs(
            tokens_U=tokens_T if index is None else tokens_T[index],
            positions_U=positions_RT if index is None else positions_RT[..., index],
            split=split,
            tokens_T=tokens_T,
            types_T=types_T,
            media=tuple(placed.medium for row in media for placed in row),
            index_U=index,
        )

    def run_backbone(
        self,
        packed: BackboneInputs,
        states_Ud: Tensor | None = None,
        backbone: nn.Module | None = None,
    ) -> Tensor:
        """Return the hidden states [U, d], see `TransformersPolicy.run_backbone`.

        All tokens and media are embedded. The language model then gets the tokens to compute.
        """
        if states_Ud is not None:
            return super().run_backbone(packed, states_Ud, backbone)
        assert isinstance(packed, MediaInputs), "`pack_inputs` returns such inputs"
        backbone = self.backbone if backbone is None else backbone
        language = backbone.get_submodule(self.language_path)
        tokens = None if self.tp_division is None else self.tp_division.tokens
        types_1T = packed.types_T[None]
        options = self._make_options(packed) | self._make_inputs(packed.media, types_1T)
        with (
            self._hide_stray_placeholders(packed.tokens_T[None], types_1T) as visible_1T,
            divide_language_inputs(language, packed.index_U, tokens),
        ):
            return backbone(input_ids=visible_1T, **options)[0][0]

    def _make_inputs(self, media: Sequence[Medium], types_NL: Tensor) -> dict[str, Any]:
        """Return the backbone's arguments for the media, which are in the order of the rows."""
        options, outputs = dict[str, Any](), dict[str, Any]()
        encoded = self._encode_media(media)
        for kind in {medium.kind: None for medium in media}:
            media_of_kind = [medium for medium in media if medium.kind == kind]
            if kind in encoded:
                outputs[kind] = encoded[kind].select(media_of_kind)
            else:
                options |= {
                    name: x.to(types_NL.device)
                    for name, x in join_media_inputs(media_of_kind).items()
                    if name in self.arguments
                }
        if outputs:
            options["mm_encoder_outputs"] = outputs
        return options | dict.fromkeys(
            {"mm_token_type_ids", "token_type_ids"} & self.arguments, types_NL
        )

    def prefill(self, rows: Sequence[Sequence[int]], media: Media) -> tuple[Any, Tensor, Tensor]:
        """Return (model output, attention mask [N, L], position of each row's next token [N]).

        The rows are padded on the left. The output has the KV cache, and logits of the last token
        only. The next token has the same position in all axes.
        """
        device, longest = self.model.device, max(map(len, rows))
        tokens_NL = torch.zeros(len(rows), longest, dtype=torch.int64, device=device)
        mask_NL, types_NL = torch.zeros_like(tokens_NL), torch.zeros_like(tokens_NL)
        row_positions = list[Tensor]()
        for i, (row, placed) in enumerate(zip(rows, media, strict=True)):
            row_start = longest - len(row)
            row_tokens = tokens_NL[i, row_start:]
            row_tokens.copy_(torch.as_tensor(row))
            mask_NL[i, row_start:] = 1
            self._mark_media(types_NL[i, row_start:], row_tokens, placed)
            text_positions = torch.arange(len(row), device=device)
            types = types_NL[i, row_start:]
            positions = self._compute_position_ids(
                row_tokens, text_positions, types, [len(row)], [placed]
            )
            positions = positions[-3:] if positions.dim() == 2 else positions[None]
            row_positions.append(nn.functional.pad(positions, (row_start, 0)))
        options = self._make_inputs([placed.medium for row in media for placed in row], types_NL)
        positions_RNL = torch.stack(row_positions, 1)
        if self.takes_positions:
            options["position_ids"] = positions_RNL if len(positions_RNL) > 1 else positions_RNL[0]
        with self._hide_stray_placeholders(tokens_NL, types_NL) as visible_NL:
            out = self.model(
                input_ids=visible_NL,
                attention_mask=mask_NL,
                use_cache=True,
                logits_to_keep=1,
                **options,
            )
        return out, mask_NL, positions_RNL.amax((0, 2)) + 1

    def _mark_media(self, types_T: Tensor, tokens_T: Tensor, media: Sequence[PlacedMedium]) -> None:
        """Write the types of one sequence's media tokens into `types_T`."""
        for start, medium in media:
            span = slice(start, start + medium.span)
            types_T[span] = self._find_types(tokens_T[span])

    @contextmanager
    def _hide_stray_placeholders(self, tokens_NL: Tensor, types_NL: Tensor) -> Iterator[Tensor]:
        """Yield the tokens, with a text token in place of each placeholder that has no medium.

        Such placeholders were sampled by the policy. Inside the `with` block the embedding layer
        still receives the original tokens.
        """
        stray_NL = (self._find_types(tokens_NL) > 0) & (types_NL == 0)
        if not stray_NL.any():
            yield tokens_NL
            return
        text = next(i for i in range(self.vocab_size) if not self._find_types(torch.tensor([i])))
        hook = self.model.get_input_embeddings().register_forward_pre_hook(
            lambda module, inputs: (tokens_NL,)
        )
        try:
            yield torch.where(stray_NL, text, tokens_NL)
        finally:
            hook.remove()

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The names of the backbone's arguments."""
        return frozenset(inspect.signature(self.backbone.forward).parameters)

    @property
    def axes(self) -> int:
        """The number of axes of a token's position: 3 (time, height, width) under M-RoPE."""
        return 3 if hasattr(self.backbone, "get_rope_index") else 1

    def _find_types(self, tokens_T: Tensor) -> Tensor:
        """Return the type id of each token (see `MEDIA_TYPES`); 0 if it is not a placeholder."""
        types_T = torch.zeros_like(tokens_T)
        for kind, number in MEDIA_TYPES.items():
            token = getattr(self.model.config, f"{kind}_token_id", None)
            if token is not None:
                types_T = types_T.masked_fill(tokens_T == token, number)
        return types_T

    def _compute_position_ids(self, tokens_T: Tensor, positions_T: Tensor, *inputs: Any) -> Tensor:
        """Return the position ids of sequences; arguments as in `compute_rope_positions`."""
        if self.axes == 1:
            return positions_T
        return compute_rope_positions(
            self.backbone, tokens_T, positions_T, *inputs, packs=self.packs
        )

    def add_zero_gradients(self, hidden_Ud: Tensor) -> Tensor:
        """Return the hidden states unchanged, connected to every trained encoder weight.

        A weight not used in this forward gets a zero gradient instead of None. Otherwise ranks
        would reduce different sets of gradients, and the optimizer would skip such weights.
        """
        if not torch.is_grad_enabled() or self.adapter is not None or not self.train_encoders:
            return hidden_Ud
        return hidden_Ud + sum(p.sum() * 0 for _, p in self.tower_parameters() if p.requires_grad)

    def _encode_media(self, media: Sequence[Medium]) -> dict[MediaKind, EncodedMedia]:
        """Return the encoder outputs by kind, except for kinds that the backbone encodes itself."""
        encoded: dict[MediaKind, EncodedMedia] = {}
        for kind in {medium.kind: None for medium in media}:
            encode = getattr(self.backbone, f"get_{kind}_features", None)
            if (
                kind not in SEPARATELY_ENCODED
                or encode is None
                or "mm_encoder_outputs" not in self.arguments
            ):
                continue
            unique = {medium.key: medium for medium in media if medium.kind == kind}
            parameters = inspect.signature(encode).parameters
            inputs = {
                name: x.to(self.model.device)
                for name, x in join_media_inputs(list(unique.values())).items()
                if name in parameters
            }
            with torch.set_grad_enabled(torch.is_grad_enabled() and self.train_encoders):
                output = encode(**inputs, return_dict=True)
            if len(output.pooler_output) == len(unique):
                encoded[kind] = EncodedMedia(output, tuple(unique))
        return encoded

    # --- probes, at load

    def _check_logits(self) -> None:
        try:
            super()._check_logits()
        except ModelError:
            # The model may not accept the row of text positions, which only packing needs.
            self.packs = False
            super()._check_logits()

    def make_probe_tokens(self, n: int) -> Tensor:
        """Return `n` tokens without placeholders."""
        tokens = super().make_probe_tokens(n)
        return torch.where(self._find_types(tokens) > 0, 0, tokens)

    @torch.no_grad()
    def _keeps_media_apart(self, probes: Sequence[Medium]) -> bool:
        """True if packing changes no hidden state, and sequences do not depend on each other."""
        rows, media = make_image_rows(self, probes)
        lengths = [len(row) for row in rows]
        positions = [torch.arange(n, device=rows[0].device) for n in lengths]
        is_medium = self._find_types(rows[0]) > 0
        changed_row = torch.where(is_medium, rows[0], (rows[0] + 1) % 3)  # ids 0 to 2 are text
        try:
            packed = self.hidden(torch.cat(rows), torch.cat(positions), lengths, media=media)
            beside_changed = self.hidden(
                torch.cat([changed_row, *rows[1:]]), torch.cat(positions), lengths, media=media
            )
        except (TypeError, ValueError, IndexError, RuntimeError):
            return False
        self.packs = False
        separate = torch.cat(
            [
                self.hidden(row, row_positions, [len(row)], media=[sequence_media])
                for row, row_positions, sequence_media in zip(rows, positions, media, strict=True)
            ]
        )
        self.packs = True
        unchanged = slice(lengths[0], None)
        return is_close(packed, separate, self.model.dtype) and is_close(
            beside_changed[unchanged], packed[unchanged], self.model.dtype
        )

    @torch.no_grad()
    def _check_media(self, probes: Sequence[Medium]) -> None:
        """Raise ModelError if the logits of text and media differ from the model's own."""
        rows, media = make_image_rows(self, probes)
        row, last_media = rows[-1], media[-1]
        inputs: dict[str, Any] = {
            name: x.to(row.device)
            for name, x in join_media_inputs([item.medium for item in last_media]).items()
        }
        inputs |= {
            name: self._find_types(row)[None]
            for name in {"mm_token_type_ids", "token_type_ids"} & self.arguments
        }
        inputs = {name: x for name, x in inputs.items() if name in self.arguments}
        expected = self.model(input_ids=row[None], use_cache=False, **inputs).logits[0]
        computed = self.logits(
            self.hidden(
                row, torch.arange(len(row), device=row.device), [len(row)], media=[last_media]
            )
        )
        if not is_close(computed, expected, self.model.dtype):
            raise ModelError(
                f"{type(self.model).__name__}: with an image, the policy's logits differ from the "
                "model's own"
            )
