"""Chat prompts: what the model's template makes of messages, and where each message went."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from examples import WordTokenizer, document, sweep_of, write_csv, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from nnsweep.documents import parse
from nnsweep.errors import UserError
from nnsweep.prompts import from_table, prepare_rows, to_table
from nnsweep.sweep import Sweep

LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate\nuser/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TRIMMED = (
    "{{ bos_token }}{% for m in messages %}{{ '# ' + m['role'] + '\n' + m['content'] | trim + "
    "eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '# assistant\n' }}{% endif %}"
)
RENAMED = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else "
    "m['role'] %}{{ '<' + role + '>\n' + m['content'] | trim + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<model>\n' }}{% endif %}"
)
TWICE = "{% for m in messages %}{{ m['content'] + ' | ' + m['content'] }}{% endfor %}"
DATED = (
    "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "{{ 'Today is ' + date_string + '\n' }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if think is defined and think is false %}{{ '\nno' }}{% endif %}"
)
SHOUTED = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] | upper }}{% endfor %}"

USER = {"role": "user", "content": "Name the capital of Austria."}
SYSTEM = {"role": "system", "content": "Be brief."}
BEGUN = {"role": "assistant", "content": "The capital is"}
OTHER = {"role": "user", "content": "Name the capital of France."}
COLUMNS = {"chat": True, "answers": {"target": "target", "foil": "foil"}}
RECORD = {"row_id": "a", "word": "Austria", "other": "France", "target": "Paris", "foil": "Rome"}


@pytest.fixture(scope="module")
def templated(tokenizer, tmp_path_factory):
    """A factory of the real tokenizer with another template; it adds a BOS token to plain text."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer.save_pretrained(folder)

    def make(template):
        made = PreTrainedTokenizerFast.from_pretrained(folder, bos_token="<|endoftext|>")
        bos = [(made.bos_token, made.bos_token_id)]
        made.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{made.bos_token} $A", special_tokens=bos
        )
        made.chat_template = template
        return made

    return make


def chat_sweep(positions=None, **changes):
    """A sweep over chats that patches the position `here`."""
    here = positions or {"here": -1}
    prompts = document()["prompts"] | COLUMNS
    write = {"site": "resid_post", "layer": 0, "position": "here", "set": "donor"}
    plain = {"prompts": prompts, "positions": here, "axes": {}, "writes": [write]}
    return sweep_of(**plain | {"on_bad_row": "exclude"} | changes)


def line(base, source=None, **changes):
    """One line of a prompt file; the donor is the same chat unless told otherwise."""
    return RECORD | {"base": base, "source": base if source is None else source} | changes


GOOD = line([USER, BEGUN], row_id="good")


@pytest.fixture
def row(tokenizer, tmp_path):
    """The row of one chat under a position `here`."""

    def run(base, source=None, here=-1, using=None, prefix=None, more=None, **changes):
        sweep = chat_sweep((more or {}) | {"here": here})
        sweep = sweep.model_copy(
            update={"prompts": sweep.prompts.model_copy(update={"answer_prefix": prefix})}
        )
        path = write_jsonl(tmp_path / "rows.jsonl", [line(base, source, **changes), GOOD])
        return prepare_rows(sweep, path, using or tokenizer, 0)[0]

    return run


@pytest.fixture
def words(row):
    """Base and donor text of the position `here`, or the reason against it."""

    def run(*chats, **how):
        found = row(*chats, **how)
        place = found.positions["here"]
        if place.reason:
            return place.reason
        ours = "".join(found.tokens[i] for i in place.base)
        return ours, "".join(found.donor_tokens[i] for i in place.donor)

    return run


# --- rendering --------------------------------------------------------------------------------

TEMPLATES = {"real": None, "llama2": LLAMA2, "trimmed": TRIMMED, "renamed": RENAMED}


@pytest.fixture(params=TEMPLATES)
def using(request, tokenizer, templated):
    """The real tokenizer and others that render otherwise."""
    template = TEMPLATES[request.param]
    return templated(template) if template else tokenizer


@pytest.mark.parametrize("messages", [[USER], [USER, BEGUN, OTHER]])
def test_a_chat_is_rendered_as_transformers_does(row, using, messages):
    found = row(messages, using=using)
    expected = using.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert found.ids == expected
    assert found.text == using.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    assert found.donor_ids == found.ids


def test_the_assistants_last_message_is_continued(row, using):
    found = row([USER, BEGUN], using=using)
    expected = using.apply_chat_template(
        [USER, BEGUN], continue_final_message=True, return_dict=False
    )
    assert found.ids == expected
    assert found.text.endswith(BEGUN["content"])


def test_there_is_one_bos_token(row, templated):
    """The tokenizer adds one to plain text, and the template writes one."""
    made = templated(TRIMMED)
    found = row([USER], using=made)
    assert found.ids.count(made.bos_token_id) == 1
    assert found.ids[0] == made.bos_token_id
    assert found.reason is None


def test_a_rendered_prompt_may_end_in_a_line_break(row):
    found = row([USER])
    assert found.text.endswith("assistant\n")
    assert found.reason is None


def test_the_table_holds_the_rendered_text(row, tokenizer):
    found = row([USER], [OTHER])
    texts = [
        tokenizer.apply_chat_template([chat], tokenize=False, add_generation_prompt=True)
        for chat in (USER, OTHER)
    ]
    table = to_table([found])
    assert [table["text"][0].as_py(), table["donor_text"][0].as_py()] == texts
    assert from_table(table) == [found]


def test_every_kind_of_file_gives_the_same_rows(tokenizer, tmp_path):
    records = [line([SYSTEM, USER]), GOOD | {"base": [OTHER, {**BEGUN, "content": "Ça: 東京"}]}]
    texts = [
        r | {"base": json.dumps(r["base"]), "source": json.dumps(r["source"])} for r in records
    ]
    paths = [
        write_jsonl(tmp_path / "lists.jsonl", records),
        write_jsonl(tmp_path / "texts.jsonl", texts),
        write_csv(tmp_path / "rows.csv", texts),
        tmp_path / "lists.parquet",
        tmp_path / "texts.parquet",
    ]
    pq.write_table(pa.Table.from_pylist(records), paths[3])
    pq.write_table(pa.Table.from_pylist(texts), paths[4])
    found = [prepare_rows(chat_sweep(), path, tokenizer, 0) for path in paths]
    assert all(row.reason is None for row in found[0])
    assert all(rows == found[0] for rows in found)


# --- what cannot be rendered ------------------------------------------------------------------


def test_a_model_without_a_template_is_one_line(tmp_path, tokenizer, templated):
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD])
    for bare in (WordTokenizer(), templated(None)):
        with pytest.raises(
            UserError, match=r"prompts.chat: the model's tokenizer has no chat temp"
        ):
            prepare_rows(chat_sweep(), path, bare, 0)


def rows_with(chat, using, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD])
    return prepare_rows(
        chat_sweep(prompts=document()["prompts"] | COLUMNS | {"chat": chat}), path, using, 0
    )


def test_a_template_never_reads_the_clock(templated, tmp_path):
    """With today's date in it, a sweep would be another one every day."""
    with pytest.raises(UserError, match=r'writes today.*chat: \{date_string: "26 Jul 2024"\}'):
        rows_with(True, templated(DATED), tmp_path)


def test_the_templates_variables_can_be_set(templated, tmp_path):
    (found,) = rows_with({"date_string": "26 Jul 2024"}, templated(DATED), tmp_path)
    assert found.text.startswith("Today is 26 Jul 2024\n")
    positions = {"here": {"segment": "user"}}
    variables = {"date_string": "1", "think": False}
    prompts = document()["prompts"] | COLUMNS | {"chat": variables}
    sweep = chat_sweep(prompts=prompts, positions=positions)
    path = write_jsonl(tmp_path / "rows.jsonl", [line([USER])])
    (found,) = prepare_rows(sweep, path, templated(DATED), 0)
    assert found.text == f"Today is 1\n{USER['content']}\nno"
    assert found.reason is None
    assert "".join(found.tokens[i] for i in found.positions["here"].base) == USER["content"]


def test_a_variable_that_no_template_reads_is_one_line(templated, tmp_path):
    with pytest.raises(UserError, match="template does not read 'thin'"):
        rows_with({"thin": False}, templated(DATED), tmp_path)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ({}, "prompts.chat: got {}"),
        ({"tokenize": True}, "prompts.chat: 'tokenize' is no variable to set"),
        ({"strftime_now": "x"}, "prompts.chat: 'strftime_now' is no variable to set"),
        ({"x": [1]}, "prompts.chat.x: got [1]"),
        ("yes", "prompts.chat: got 'yes'"),
    ],
)
def test_a_bad_value_of_chat_is_one_line(chat, message):
    with pytest.raises(UserError) as caught:
        parse(Sweep, document(prompts=document()["prompts"] | {"chat": chat}), "file.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("Hello", "'Hello' is no JSON list of messages (Expecting value, character 0)"),
        ("[{", "'[{' is no JSON list of messages"),
        ("3", "'3' is no list of {role, content} messages"),
        (json.dumps(USER), "is no list of {role, content} messages"),
        ([], "the list of messages is empty"),
        ("", "the prompt is empty"),
        (["Hello"], "message 1 is 'Hello'; give {role, content}"),
        ([USER, {"role": "user"}], "message 2: content is None; give text"),
        ([{"role": 3, "content": "x"}], "message 1: role is 3; give text"),
        ([{"role": "user", "content": ["x"]}], "message 1: content is ['x']; give text"),
        ([USER | {"name": "x"}], "message 1 has the unknown key 'name'. Allowed: role, content"),
        ([USER, BEGUN | {"content": " "}], "message 2, which is to be continued, is empty"),
        (
            [USER, BEGUN | {"content": "The capital is "}],
            "message 2, which is to be continued, ends in white space: 'The capital is '",
        ),
    ],
)
def test_bad_messages_are_a_reason(row, cell, reason):
    found = row(cell, [USER])
    assert reason in found.reason
    assert found.positions["here"].base == []
    if cell:
        assert found.positions["here"].reason == f"position here: {found.reason}"
    found = row([USER], cell)
    assert found.reason.startswith("donor: ")
    assert reason in found.reason


def test_what_the_template_refuses_is_a_reason_of_one_line(row, templated):
    made = templated(LLAMA2)
    assert row([SYSTEM, USER], using=made).reason == (
        "the chat template refuses the messages: No system role"
    )
    assert row([USER, OTHER], using=made).reason == (
        "the chat template refuses the messages: Roles must alternate user/assistant"
    )


def test_bad_messages_stop_a_strict_sweep(tokenizer, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [line([USER | {"nam": "x"}]), GOOD])
    with pytest.raises(UserError, match=r"1 of 2 rows cannot be used\. a: message 1 has the"):
        prepare_rows(chat_sweep(on_bad_row="refuse"), path, tokenizer, 0)


# --- answers ----------------------------------------------------------------------------------


def first_of(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_an_answer_follows_the_generation_prompt_without_a_space(row, tokenizer):
    assert row([USER]).answers["target"] == first_of(tokenizer, "Paris")


def test_an_answer_follows_a_begun_message_after_a_space(row, tokenizer):
    assert row([USER, BEGUN]).answers["target"] == first_of(tokenizer, " Paris")


def test_an_answer_follows_as_the_template_writes_it(row, templated):
    made = templated(LLAMA2)
    assert row([USER], using=made).answers["target"] == first_of(made, " Paris")
    made = templated(TRIMMED)
    assert row([USER], using=made).answers["target"] == first_of(made, "Paris")


def test_a_declared_prefix_wins(row, tokenizer):
    assert row([USER], prefix=" ").answers["target"] == first_of(tokenizer, " Paris")
    assert row([USER, BEGUN], prefix="", target="ly").answers["target"] == first_of(tokenizer, "ly")


# --- segments ---------------------------------------------------------------------------------

TALK = [SYSTEM, USER, BEGUN, OTHER]


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        ({"segment": "system"}, "Be brief."),
        ({"segment": "assistant"}, "The capital is"),
        ({"segment": "user", "occurrence": 1}, "Name the capital of Austria."),
        ({"segment": "user", "occurrence": -1}, "Name the capital of France."),
        ({"segment": "user", "occurrence": 2, "token": "first"}, "Name"),
        ({"segment": "user", "occurrence": 2, "token": "last"}, "."),
        ({"segment": "generation"}, "<|im_start|>assistant\n"),
        ({"segment": "generation", "token": "last"}, "\n"),
    ],
)
def test_a_segment_is_the_content_of_a_message(words, here, expected):
    assert words(TALK, here=here) == (expected, expected)


def test_a_segment_is_found_in_every_template(words, using):
    more = {"question": {"segment": "user", "occurrence": 1}, "reply": {"segment": "assistant"}}
    talk = [USER, {**BEGUN, "content": "model"}, OTHER]
    found = words(talk, here=["question", "reply"], more=more, using=using)
    assert "".join(found[0].split()) == "".join((USER["content"] + "model").split())


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (
            {"segment": "user"},
            "2 messages of role user (system, user, assistant, user); give an occ",
        ),
        ({"segment": "user", "occurrence": 3}, "only 2 messages of role user"),
        ({"segment": "user", "occurrence": -3}, "only 2 messages of role user"),
        ({"segment": "tool"}, "no message of role tool; roles: system, user, assistant, user"),
    ],
)
def test_a_segment_that_is_not_there_is_a_reason(words, here, reason):
    assert words(TALK, here=here).startswith(f"position here: {reason}")


def test_the_templates_own_system_prompt_is_no_message(words, row):
    assert "helpful AI assistant" in row([USER]).text
    assert "no message of role system" in words([USER], here={"segment": "system"})


def test_a_begun_message_is_a_segment_and_has_no_generation_prompt(words):
    assert words([USER, BEGUN], here={"segment": "assistant"}) == (BEGUN["content"],) * 2
    assert "no generation prompt" in words([USER, BEGUN], here={"segment": "generation"})


def test_a_template_may_append_nothing(words, templated):
    made = templated(LLAMA2)
    assert "appends no generation prompt" in words(
        [USER], here={"segment": "generation"}, using=made
    )


def test_a_trimmed_content_is_found(words, templated):
    loose = [USER | {"content": "  Name the capital.\n"}]
    for template in (LLAMA2, TRIMMED):
        found = words(loose, here={"segment": "user"}, using=templated(template))
        assert found[0].strip() == "Name the capital."


@pytest.mark.parametrize("template", [TWICE, SHOUTED])
def test_a_template_that_changes_a_content_is_a_reason(words, templated, template):
    reason = words([USER], here={"segment": "user"}, using=templated(template))
    assert "does not write message 1 once and as it is" in reason


def test_an_empty_message_has_no_tokens(words):
    empty = SYSTEM | {"content": ""}
    assert "message 1 of role system is empty" in words([empty, USER], here={"segment": "system"})


def test_segments_of_unequal_length_need_align(words):
    longer = [OTHER | {"content": "Please name the capital of France."}]
    reason = words([USER], longer, here={"segment": "user"})
    assert "spans of unequal length" in reason
    aligned = {"segment": "user", "align": "last", "occurrence": 1}
    assert words([USER], longer, here=aligned)[1] == " name the capital of France."
    whole = words([USER], longer, here=aligned | {"align": "mean"})
    assert whole == (USER["content"], longer[0]["content"])


def test_a_list_may_hold_segments(words):
    more = {"question": {"segment": "user"}, "prompt": {"segment": "generation"}}
    found = words([USER], here=["prompt", "question"], more=more)
    assert found[0] == USER["content"] + "<|im_start|>assistant\n"


def test_a_text_is_found_in_the_rendered_prompt(words):
    subject = {"text": "word", "donor_text": "other"}
    assert words([USER], [OTHER], here=subject) == (" Austria", " France")
    assert words([USER], here={"text": "word"}, word="system") == ("system", "system")


word = st.sampled_from(["user", "assistant", "system", "Be", "brief", "Paris", "the", "assist"])
content = st.lists(word, min_size=1, max_size=4).map(" ".join)
talk = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant"]), "content": content}
    ),
    min_size=1,
    max_size=4,
)


@given(talk, st.data())
def test_a_segment_covers_exactly_its_content(tokenizer, tmp_path, messages, data):
    """Also where the content's words stand in the template too."""
    number = data.draw(st.integers(0, len(messages) - 1))
    role = messages[number]["role"]
    occurrence = sum(message["role"] == role for message in messages[: number + 1])
    sweep = chat_sweep({"here": {"segment": role, "occurrence": occurrence}})
    path = write_jsonl(tmp_path / "rows.jsonl", [line(messages), GOOD])
    found = prepare_rows(sweep, path, tokenizer, 0)[0]
    place = found.positions["here"]
    assert "".join(found.tokens[i] for i in place.base) == messages[number]["content"]
    before = "".join(found.tokens[: place.base[0]])
    assert before.endswith(f"<|im_start|>{role}\n")
    assert before.count("<|im_start|>") == number + 1 + (messages[0]["role"] != "system")
