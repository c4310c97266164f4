"""Fields of other servers (vLLM, SGLang, TGI, llama.cpp, Ollama and others) that change the answer
and that Baton does not have.

They are refused with an error that names the field and says what to use instead. The values after a
field's name are neutral: with such a value the field changes nothing, so clients that always send
it are served."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from router.http.unknown_fields import UnsupportedField


def _because(reason: str, **neutral: tuple[Any, ...]) -> dict[str, UnsupportedField]:
    return {name: UnsupportedField(reason, values) for name, values in neutral.items()}


_OTHER_NAMES = {
    **_because(
        "use max_tokens",
        max_new_tokens=(), max_output_tokens=(), max_length=(), max_tokens_to_sample=(),
        n_predict=(-1,), num_predict=(-1,),
    ),
    **_because("use min_tokens", min_new_tokens=(0,), min_length=(0,)),
    **_because("use stop", stop_sequences=([],), stop_strings=([],), stopping_strings=([],)),
    **_because("use stop_token_ids", eos_token_id=(), custom_eos_token_id=()),
    **_because("use ignore_eos", ban_eos_token=(False,)),
    **_because("use seed", random_seed=(), sampling_seed=()),
    **_because("use repetition_penalty", rep_pen=(1,)),
    **_because("use temperature 0 for greedy sampling", do_sample=(True,)),
    **_because("use truncate_prompt_tokens", truncate=()),
    **_because("use echo", return_full_text=(False,)),
    **_because("use logprobs", n_probs=(0,), top_n_tokens=(0,), return_logprob=(False,)),
    **_because("use return_token_ids", return_tokens=(False,)),
    **_because("use prompt with token ids", prompt_token_ids=(), input_ids=()),
    **_because("use response_format", json_schema=(), format=("",), response_schema=()),
    **_because("use guided_grammar", grammar=("",), ebnf=()),
    **_because("use guided_regex", regex=()),
    **_because(
        "its fields belong in the body itself",
        extra_body=({},), options=({},), parameters=({},), sampling_params=({},),
    ),
    **_because("send a message of role system", system=("",), system_prompt=("",)),
}  # fmt: skip
"""Fields for whose effect Baton has another field."""

_SAMPLING = _because(
    "there is no such sampling method",
    use_beam_search=(False,), num_beams=(1,), beam_width=(1,), early_stopping=(False,),
    length_penalty=(1,), diversity_penalty=(0,),
    typical_p=(1,), typical=(1,), typ_p=(1,), top_a=(0,), tfs=(1,), tfs_z=(1,), top_nsigma=(0, -1),
    top_n_sigma=(0, -1), eta_cutoff=(0,), epsilon_cutoff=(0,), penalty_alpha=(0,),
    mirostat=(0,), mirostat_mode=(0,), dry_multiplier=(0,), xtc_probability=(0,),
    smoothing_factor=(0,), dynamic_temperature=(False,), dynatemp_range=(0,),
    temperature_last=(False,), samplers=(), sampler_order=(), sampler_seq=(), sampler_priority=(),
    min_keep=(0,), no_repeat_ngram_size=(0,), encoder_repetition_penalty=(1,),
    repetition_penalty_range=(), rep_pen_range=(), penalize_nl=(False,),
    repetition_detection=(),
    guidance_scale=(1,), negative_prompt=("",), watermark=(False,), safe_prompt=(False,),
    custom_token_bans=("",), banned_tokens=([],), banned_strings=([],), bad_words_ids=([],),
    stop_regex=("", []), logit_processor=(), logits_processors=([],), custom_logit_processor=(),
    custom_params=(),
    t_max_predict_ms=(0, -1), thinking_token_budget=(-1,), thinking_budget=(-1,),
    reasoning_budget=(-1,), thinking_budget_tokens=(-1,),
)  # fmt: skip
"""Sampling methods that Baton lacks. The parameters of these methods (``mirostat_tau``,
``dry_base``, ``xtc_threshold`` and the like) are not listed: they change nothing while the method
is off, and if it is on, the request is refused because of the method."""

_MODELS = _because(
    "there is one model, without adapters",
    adapter=(), adapters=([],), adapter_id=(), lora=([],), lora_path=(), lora_request=(),
    lora_adapter=(), lora_name=(),
)  # fmt: skip

_INPUTS = {
    **_because(
        "the model supports only text",
        images=([],), image_data=(), video_data=(), audio_data=(), multi_modal_data=(),
    ),
    **_because("prompts are text or token ids", prompt_embeds=(), input_embeds=()),
    **_because("only workers transfer KV", kv_transfer_params=({},)),
    **_because("put the documents into a message", documents=([],)),
    **_because(
        "there is no search; offer one as a tool",
        search_parameters=(), web_search=(False,), enable_search=(False,), plugins=([],),
    ),
}  # fmt: skip

_OUTPUTS = _because(
    "the answer's form can't be changed in this way",
    detokenize=(True,), no_stop_trim=(False,), include_reasoning=(True,),
    separate_reasoning=(True,), stream_reasoning=(True,), parse_tool_calls=(True,),
    reasoning_format=("auto", "deepseek", "parsed"), post_sampling_probs=(False,),
    return_hidden_states=(False,), structural_tag=(), guided_whitespace_pattern=(),
    guided_json_object=(False,), logprob_token_ids=(), vllm_xargs=({},),
    decoder_input_details=(False,),
)  # fmt: skip

_OTHER_ENDPOINT = {
    **_because("chats have messages", prompt=("", [])),
    **_because("it is a field of chats", messages=([],), tools=([],), top_logprobs=(0,)),
    **_because(
        "it is a field of chats",
        max_completion_tokens=(), tool_choice=("none", "auto"), reasoning_effort=("none",),
        add_generation_prompt=(), continue_final_message=(False,), chat_template_kwargs=({},),
        reasoning=({},), enable_thinking=(), think=(), thinking=(),
    ),
    **_because("it is a field of completions", echo=(False,), best_of=(1,), suffix=("",)),
    **_because("it is a field of another API", input=(), inputs=(), instructions=("",)),
}  # fmt: skip
"""Fields of other endpoints. Only a field that the body's own schema lacks is looked up here."""

UNSUPPORTED_FIELDS: Mapping[str, UnsupportedField] = MappingProxyType(
    {**_OTHER_NAMES, **_SAMPLING, **_MODELS, **_INPUTS, **_OUTPUTS, **_OTHER_ENDPOINT}
)
