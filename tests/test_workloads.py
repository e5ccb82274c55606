"""The workload: the suite that comes along, and files of questions from elsewhere."""

import json

import pytest

import specnb
from specnb.workloads import GROUPS, Prompt


def write(path, *questions):
    path.write_text("".join(json.dumps(q) + "\n" for q in questions), encoding="utf-8")
    return path


class Words:
    """A tokenizer of words, with or without a chat template."""

    def __init__(self, chat_template=None):
        self.chat_template, self.seen = chat_template, None

    def __call__(self, text):
        return {"input_ids": [len(word) for word in text.split()]}

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        self.seen = [(m["role"], m["content"]) for m in messages]
        assert add_generation_prompt and return_dict
        return self(" ".join(m["content"] for m in messages) + " assistant:")


# --- the suite ---


def test_the_suite_has_ten_questions_of_each_kind():
    prompts = specnb.load_prompts()
    assert [prompt.group for prompt in prompts] == [group for group in GROUPS for _ in range(10)]
    assert len({prompt.id for prompt in prompts}) == len({prompt.turns for prompt in prompts}) == 90
    assert all(len(prompt.turns) == 1 and len(prompt.turns[0]) > 40 for prompt in prompts)


def test_prompts_of_some_groups():
    assert {p.group for p in specnb.load_prompts(group="maths")} == {"maths"}
    few = specnb.load_prompts(group=["list", "code_edit"], limit=2)
    assert [p.group for p in few] == ["code_edit"] * 2 + ["list"] * 2
    with pytest.raises(ValueError, match=r"no group 'poetry'.*'open_story'"):
        specnb.load_prompts(group="poetry")


@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
def test_limit_is_a_whole_number(limit):
    with pytest.raises(ValueError, match="limit must be a whole number"):
        specnb.load_prompts(limit=limit)


# --- questions from elsewhere ---


def test_questions_in_the_form_of_mt_bench(tmp_path):
    path = write(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."], "reference": ["x"]},
        {"turns": ["Hello?"]},
    )
    assert specnb.load_prompts(path) == [
        Prompt("81", "writing", ("Write.", "Rewrite.")),
        Prompt("question:2", "", ("Hello?",)),
    ]
    assert [p.id for p in specnb.load_prompts(tmp_path, group="writing")] == ["81"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["a"', r"line 3: not JSON .*one object a line"),
        ('["a"]', r"line 3: expected a JSON object with `turns`, got \[\"a\"\]"),
        ('{"prompt": "a"}', "line 3: `turns` must be .* there is none"),
        ('{"turns": []}', r"line 3: `turns` must be .* got \[\]"),
        ('{"turns": "a"}', 'line 3: `turns` must be .* got "a"'),
        ('{"turns": ["a", 3]}', r'line 3: `turns` must be .* got \["a", 3\]'),
        ('{"turns": ["  "]}', "line 3: `turns` must be .* none empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"turns": ["good"]}}\n\n{line}\n')
    with pytest.raises(ValueError, match=r"mine\.jsonl, " + message):
        specnb.load_prompts(path)


def test_bad_files(tmp_path):
    with pytest.raises(ValueError, match="holds no questions"):
        specnb.load_prompts(write(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match="two questions have the question_id '7'"):
        specnb.load_prompts(write(tmp_path / "twins.jsonl", {"question_id": 7, "turns": ["a"]},
                                  {"question_id": "7", "turns": ["b"]}))  # fmt: skip
    (tmp_path / "latin.jsonl").write_bytes('{"turns": ["é"]}'.encode("latin-1"))
    with pytest.raises(ValueError, match="not a text file in UTF-8"):
        specnb.load_prompts(tmp_path / "latin.jsonl")
    with pytest.raises(FileNotFoundError):
        specnb.load_prompts(tmp_path / "missing.jsonl")


# --- from a question to tokens ---


def test_encode_uses_the_chat_template():
    tokenizer = Words(chat_template="yes")
    ids = specnb.encode(tokenizer, "Tell me more")
    assert ids.tolist() == [[4, 2, 4, 10]]
    assert tokenizer.seen == [("user", "Tell me more")]


def test_later_turns_follow_the_answers():
    tokenizer, prompt = Words(chat_template="yes"), Prompt("1", "", ("One?", "Two?", "Three?"))
    specnb.encode(tokenizer, prompt, answers=["1", "2"])
    roles = ["user", "assistant", "user", "assistant", "user"]
    assert tokenizer.seen == list(zip(roles, ["One?", "1", "Two?", "2", "Three?"]))
    assert specnb.encode(tokenizer, prompt).shape == (1, 2)
    with pytest.raises(ValueError, match="3 turns; with 3 answers"):
        specnb.encode(tokenizer, prompt, answers=["1", "2", "3"])


def test_encode_without_a_chat_template_takes_plain_text():
    assert specnb.encode(Words(), Prompt("1", "", ("One two", "Three")), answers=["Four"]).tolist() == [[3, 3, 4, 5]]
    with pytest.raises(ValueError, match="makes no tokens"):
        specnb.encode(Words(), " ")
