# ruff: noqa: SIM905
"""Questions to distil from: tasks of nine kinds, put together from word lists and templates by a seeded generator.

    for kind, question in specnb.curriculum.questions(1000, seed=0): ...

A draft model has to guess what the target writes, so it learns from the target's own answers; all that is needed from
outside are questions. These cover the kinds of the suite that comes with specnb (`specnb.workloads.GROUPS`) and share
no run of eight words with any of its ninety questions, which are kept for measuring (`held_out_runs`).
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from specnb.workloads import load_prompts

RUN = 8  # words in a row that no training question may share with a held-out one

NAMES = (
    "Anders Beatrice Carlos Dina Edgar Farah Gustav Helena Igor Jasmin Kenji Laura Milan Nadia Oscar Paula Quentin "
    "Rosa Stefan Tara Umar Viktor Wanda Yusuf Zoe Marta Pablo Ingrid Samir Leila Bruno Clara Dmitri Elsa Felix Greta "
    "Hugo Iris Jonas Karin Luis Monica Nils Olga Priya Ravi Sofia Tomas Ursula Wei Amara Bjorn Chloe Daniel Emily "
    "Frank"
).split()
SURNAMES = (
    "Lindqvist Moreau Castillo Petrov Yamada Okoro Schmidt Novotny Costa Larsen Ivanov Singh Brennan Dubois Keller "
    "Tanaka Mendez Osei Fischer Horvat Nilsen Rahman Walsh Zhang Ferrari Bauer Kowalski Jensen Ortega Haas"
).split()
CITIES = (
    "Lisbon Oslo Prague Nairobi Lima Kyoto Turin Gdansk Quito Cork Malmo Izmir Dakar Hanoi Ghent Bilbao Riga Seville "
    "Tampere Graz Leeds Ottawa Perth Busan Cusco Basel Nice Split Tartu Bern"
).split()
ANIMALS = (
    "fox owl turtle hedgehog crow otter bear goat heron beaver cat frog horse spider snail penguin rabbit wolf "
    "parrot mouse"
).split()
JOBS = (
    "baker;librarian;pilot;gardener;nurse;carpenter;astronomer;fisherman;tailor;violinist;mechanic;postman;cook;"
    "painter;shepherd;clockmaker;teacher;geologist;diver;engineer;photographer;beekeeper;plumber;translator"
).split(";")
PLACES = (
    "an abandoned railway station;a floating village;the top of a windmill;a forest that never sleeps;an old theatre;"
    "a desert town;a submarine;a castle on a cliff;a small island;the last bookshop in town;a night train;"
    "a frozen lake;a space station;a mountain hut;a museum after closing time;a garden behind a hospital;"
    "a busy kitchen;a lost city"
).split(";")
EVENTS = (
    "finds a key that opens nothing;loses the way in the fog;receives a letter meant for somebody else;"
    "learns to whistle;builds a boat out of doors;wins a prize by mistake;has to keep a secret for a day;"
    "discovers a hidden room;meets a younger version of himself;forgets how to be angry;tries to cook for a king;"
    "hears music under the floor;repairs a broken radio;plants a strange seed;is late for the most important day;"
    "saves a village from a flood;teaches a machine to laugh;follows a trail of blue paint;"
    "trades places with a friend;waits for a ship"
).split(";")
MOODS = "short;funny;sad;mysterious;gentle;scary;surprising;hopeful;strange;quiet;exciting;warm".split(";")
FORMS = (
    "story;tale;poem;dialogue;diary entry;letter;fable;scene for a play;monologue;song;legend;bedtime story"
).split(";")
TOPICS = (
    "photosynthesis;the water cycle;gravity;volcanoes;how vaccines work;the French Revolution;supply and demand;"
    "black holes;recycling;how a bill becomes law;plate tectonics;the history of bread;how airplanes fly;"
    "electric cars;the human heart;earthquakes;machine learning;the Silk Road;coral reefs;how to write a CV;sleep;"
    "the Roman Empire;chess openings;climate change;how the internet works;the solar system;healthy breakfasts;"
    "learning a language;the immune system;jazz;renewable energy;the invention of printing;time management;"
    "how bridges are built;tea;public speaking;meditation;inflation;evolution;the moon landing;wind power;pandas;"
    "the Great Wall of China;running a marathon;budgeting;DNA;soil;how batteries work;lightning;rainforests;"
    "the printing press;compound interest;friendship;teamwork;databases;version control;unit testing;"
    "sorting algorithms;recursion;encryption;object-oriented programming;web servers;regular expressions;"
    "neural networks;the scientific method;migration of birds;glaciers;deserts;origami;photography;pottery;"
    "how to prepare for an interview;conflict at work;remote work;houseplants;composting;first aid;road safety;"
    "the Olympic Games;how rainbows form;tides;magnets;sound;the Renaissance;democracy;taxes;insurance;mortgages;"
    "stress"
).split(";")
AUDIENCES = (
    "a child;a beginner;a university student;my grandmother;a new colleague;a ten-year-old;a busy manager"
).split(";")
THINGS = (
    "countries in Africa;vegetables;programming languages;famous scientists;sports;desserts;kinds of trees;"
    "board games;inventions;healthy snacks;books for teenagers;hobbies;birds;rivers;kitchen tools;ways to relax;"
    "gift ideas;farm animals;chemical elements;planets and moons;capital cities;dances;insects;"
    "job interview questions;ways to save money;exercises without equipment;things to do on a rainy day;"
    "tips for better sleep;ways to learn vocabulary;safety rules;names for a puppy;ideas for a school project;soups;"
    "means of transport;flowers;languages;islands;garden tasks;mistakes beginners make when cooking;"
    "reasons to read every day;good habits;computer parts;team games;spices"
).split(";")
GOODS = (
    "pencils apples chairs tickets lamps bricks cups shirts books bottles stamps eggs batteries plates towels "
    "candles bicycles notebooks loaves seeds"
).split()
LANGUAGES = "French Spanish German Italian Portuguese Dutch".split()
WORDS = (
    "table window river winter bridge garden teacher yellow green Sunday Thursday mountain doctor shoe kitchen milk "
    "cheese dog horse brother sister to write to run to sing heavy cheap early late apple knife street hospital "
    "summer spring black white evening morning train ticket market fish rain cloud school"
).replace("to ", "to_").split()  # fmt: skip

# --- sentences that passages are made of; {n} a name, {s} a surname, {c} a city, {j} a job, {a} an animal, {#} a number
THEMES: dict[str, list[str]] = {
    "a workshop": [
        "The workshop of {n} {s} stands at the edge of {c}.",
        "It was opened {#} years ago by a {j}.",
        "Every week about {#} customers bring something to repair.",
        "Most of them come on Saturday, when {n} helps at the counter.",
        "The most expensive machine cost {#} euros and is older than the owner.",
        "In spring the roof leaked, and for {#} days nobody could work.",
        "A {j} from {c} offered to buy the house, but the offer was refused.",
        "Next year two apprentices will start, and a second room will be rented.",
        "On the wall hangs a photograph of a {a}, which nobody can explain.",
    ],
    "a journey": [
        "{n} and {m} left {c} early on a Monday morning.",
        "Their train was {#} minutes late because of a fallen tree.",
        "At the border they had to show their tickets twice.",
        "In {d} they stayed with a {j} who speaks four languages.",
        "The museum there owns {#} paintings and one stuffed {a}.",
        "On the third day it rained so hard that the river rose by {#} centimetres.",
        "They spent {#} euros more than they had planned.",
        "{m} wants to go back in autumn, when there are fewer visitors.",
    ],
    "an animal": [
        "The {a} is active mainly at dusk and at dawn.",
        "An adult weighs about {#} grams in summer and a little more before winter.",
        "It eats seeds, insects and sometimes fruit that has fallen from trees.",
        "Biologists from {c} marked {#} of them and followed them for two years.",
        "Most of them never moved more than {#} metres from the place where they were born.",
        "In cold weather it lives in groups, which saves energy.",
        "Its greatest danger is traffic, not hunters.",
        "{n} {s}, who led the study, was surprised by how long they live.",
    ],
    "an event": [
        "The concert in {c} began half an hour late.",
        "About {#} people had bought tickets, and {#} more waited outside.",
        "The singer {n} {s} lost her voice after the second song.",
        "A {j} from the audience took her place, and everybody applauded.",
        "The organisers promised to give back {#} euros for each ticket.",
        "Newspapers wrote about it for a week.",
        "The hall will be closed in July, because the floor has to be replaced.",
        "{m}, who sold drinks at the door, said that it was the best evening of the year.",
    ],
    "a firm": [
        "{s} and Sons produces {g} in a factory near {c}.",
        "Last year it sold {#} thousand of them, {#} percent more than the year before.",
        "The new director, {n} {s}, was a {j} before she joined the firm.",
        "She wants to use less water and to replace the old machines within {#} months.",
        "The workers are paid monthly and have {#} days of holiday.",
        "A warehouse in {d} will be closed at the end of the year.",
        "The firm was founded in a kitchen and had one employee, a {j}.",
        "Customers complain mostly about slow delivery.",
    ],
    "a school": [
        "The school in {c} has {#} pupils and {#} teachers.",
        "Lessons begin at a quarter past eight and end at two.",
        "On Wednesdays a {j} visits the older pupils and talks about the job.",
        "{n} won the reading contest with a story about a {a}.",
        "The library lends {#} books a month, most of them in winter.",
        "Telephones must stay in the lockers until the last lesson is over.",
        "Parents have collected {#} euros for a new climbing frame.",
        "The trip to {d} takes place in June, if the weather allows it.",
    ],
    "a discovery": [
        "In a cellar in {c}, workers found a box with {#} old coins.",
        "The oldest of them is about {#} years old.",
        "{n} {s}, a {j}, recognised the drawing of a {a} on one side.",
        "Experts think that a merchant hid the box during a war.",
        "The coins will be shown in {d} until the end of March.",
        "Whoever finds something like this must report it within three days.",
        "The workers receive a reward of {#} euros, which they want to share.",
        "The house itself was built later than the box was buried.",
    ],
    "a recipe": [
        "This soup comes from the region around {c} and needs about {#} minutes.",
        "Cut two onions and three carrots into small pieces.",
        "Fry them in a little oil until the onions are soft.",
        "Add {#} millilitres of water and a spoon of salt.",
        "Let it cook slowly, and stir it from time to time.",
        "{n}, a {j}, adds a slice of lemon at the end.",
        "It tastes best with dark bread and keeps for two days in the fridge.",
        "For children, leave out the pepper.",
    ],
}

FUNCTIONS = (
    "reverse_words(text): reverse the order of the words;count_letters(text): count how often each letter occurs;"
    "is_prime(n): tell whether n is a prime number;fibonacci(n): the first n Fibonacci numbers;"
    "flatten(nested): flatten a nested list;average(values): the mean of a list of numbers;"
    "median(values): the median;remove_duplicates(items): keep the first of equal items;"
    "merge_sorted(a, b): merge two sorted lists;binary_search(items, target): the index of the target or -1;"
    "celsius_to_fahrenheit(c): convert a temperature;longest_word(text): the longest word of a text;"
    "caesar(text, shift): encrypt with a Caesar cipher;gcd(a, b): greatest common divisor;"
    "power(base, exponent): a power without the ** operator;second_largest(numbers): the second largest number;"
    "transpose(matrix): transpose a list of lists;is_anagram(a, b): whether two words are anagrams;"
    "chunks(items, size): split a list into parts;digits_sum(n): the sum of the digits;"
    "leap_year(year): whether a year is a leap year;invert(mapping): swap keys and values;"
    "bubble_sort(items): sort a list;parse_csv_line(line): split a line at commas;"
    "most_common(items): the most common item;to_binary(n): a number in binary;"
    "capitalize_names(names): capitalise each name;group_by_length(words): words by length;"
    "matrix_sum(matrix): the sum of all numbers;count_lines(path): the number of lines of a file;"
    "read_json(path): read a JSON file;validate_email(address): whether it looks like an e-mail address;"
    "random_password(length): a random password;days_between(a, b): days between two dates;"
    "rotate(items, n): rotate a list;common_items(a, b): items in both lists;"
    "word_frequencies(text): how often each word occurs;compress(text): run-length encoding;"
    "roman(n): a Roman numeral;pascal_triangle(n): rows of Pascal's triangle"
).split(";")
CLASSES = (
    "Queue with enqueue, dequeue and size;Rectangle with area and perimeter;Counter with increment and reset;"
    "Playlist with add, remove and shuffle;Temperature with conversion methods;Library with add_book and find;"
    "Matrix with addition;LinkedList with append and to_list;Car with drive and refuel;"
    "Student with grades and average;Timer with start and stop;ShoppingCart with add, remove and total;"
    "Point with distance;Cache with get and put;Employee with raise_salary;Deck of cards with draw;"
    "Circle with radius and area;TodoList with add and complete"
).split(";")
NOUNS = "value item price score user word line node row name count total index result amount order".split()


def pick(rng: random.Random, items: Any) -> Any:
    return items[rng.randrange(len(items))]


def passage(rng: random.Random) -> str:
    """Four to seven sentences of one theme with names and figures filled in."""
    sentences = THEMES[pick(rng, sorted(THEMES))]
    chosen = sorted(rng.sample(range(len(sentences)), rng.randint(4, min(7, len(sentences)))))
    words = {
        "n": pick(rng, NAMES),
        "m": pick(rng, NAMES),
        "s": pick(rng, SURNAMES),
        "c": pick(rng, CITIES),
        "d": pick(rng, CITIES),
        "j": pick(rng, JOBS),
        "a": pick(rng, ANIMALS),
        "g": pick(rng, GOODS),
    }
    text = " ".join(sentences[i] for i in chosen)
    return re.sub(r"\{(.)\}", lambda m: words.get(m[1]) or str(rng.choice((1, 10, 100)) * rng.randint(2, 19)), text)


def summary(rng: random.Random, text: str) -> str:
    told = pick(
        rng,
        [
            "Summarize the following text in {k} sentences.",
            "Write a brief summary of this text.",
            "Shorten this text to about half its length. Keep its wording.",
            "What are the main points of this text?",
            "Summarise this in one paragraph, and stay close to the original.",
            "Give a short summary:",
            "Copy the {k} most important sentences from this text.",
            "Rewrite this text, and leave out everything unimportant.",
            "Summarize what happened, using phrases from the text.",
            "Condense the report below into {k} sentences.",
        ],
    )
    told = told.format(k=pick(rng, ["two", "three", "two or three"]))
    return pick(rng, [f"{told}\n\n{text}", f"{text}\n\n{told}", f'{told}\n\n"{text}"'])


def retrieval(rng: random.Random, text: str) -> str:
    asked = pick(
        rng,
        [
            "Which numbers are mentioned in the text, and what do they stand for?",
            "Who is mentioned, and what do they do?",
            "Where does this take place? Quote the sentence that says so.",
            "What happened first? Answer with a quotation.",
            "What will happen next? Answer with words from the text.",
            "Which sentence contains the largest number? Quote it.",
            "Quote the last sentence and explain it.",
            "What is this text about? Answer in one sentence, then quote one from it.",
            "What do we learn about {n}? Quote the text if it says anything.",
            "Is anything said about money? Quote it.",
            "Find the most surprising statement, quote it, and say why it is surprising.",
            "List every name in the text, each with the sentence in which it occurs.",
        ],
    ).format(n=pick(rng, NAMES))
    head = pick(rng, ["Text", "Passage", "Context", "Article", "Report"])
    return pick(
        rng,
        [
            f"{head}: {text}\n\nQuestion: {asked}",
            f"Read the text and answer.\n\n{text}\n\n{asked}",
            f"{asked}\n\n{head}:\n{text}",
            f"Use only this text to answer: {asked}\n\n{text}",
        ],
    )


def story(rng: random.Random) -> str:
    who = pick(rng, [f"a {pick(rng, JOBS)}", f"a {pick(rng, ANIMALS)}", pick(rng, NAMES), f"two {pick(rng, JOBS)}s"])
    a = f"a {pick(rng, MOODS)} {pick(rng, FORMS)}"
    return pick(
        rng,
        [
            f"Write {a} about {who} who {pick(rng, EVENTS)}.",
            f"Write {a} set in {pick(rng, PLACES)}.",
            f"Tell me {a} in which {who} {pick(rng, EVENTS)}. Give it a title.",
            f"Write {a} about {pick(rng, TOPICS)}.",
            f"Write the first paragraph of a novel about {who} in {pick(rng, PLACES)}.",
            f"Write {a}. It takes place in {pick(rng, PLACES)}, and the main character is {who}.",
            f"Describe {pick(rng, PLACES)} in the {pick(rng, ['rain', 'early morning', 'snow', 'heat of summer'])}.",
            f"Continue this {pick(rng, FORMS)}: Once, {who} came to {pick(rng, PLACES)} and",
        ],
    )


def explanation(rng: random.Random) -> str:
    topic = pick(rng, TOPICS)
    return pick(
        rng,
        [
            f"Explain {topic} to {pick(rng, AUDIENCES)}.",
            f"What should I know about {topic}?",
            f"Write a short paragraph about {topic}.",
            f"Write an introduction to {topic} in five sentences.",
            f"Why does {topic} matter?",
            f"Compare {topic} and {pick(rng, TOPICS)}.",
            f"What are common mistakes with {topic}?",
            f"Write an e-mail to {pick(rng, NAMES)} about {topic}.",
            f"Give a definition and an example: {topic}.",
            f"Write a short article about {topic} with a headline.",
        ],
    )


def listing(rng: random.Random) -> str:
    n, things = rng.randint(4, 12), pick(rng, THINGS)
    form = pick(
        rng,
        [
            "",
            "",
            " Use a numbered list.",
            " One per line.",
            " Use bullet points.",
            " Add one sentence to each.",
            " Sort them by name.",
            ' Use the form "name: reason".',
            " Keep each item under ten words.",
        ],
    )
    return pick(
        rng,
        [
            f"List {n} {things}.{form}",
            f"Give me {n} {things}.{form}",
            f"Name {n} {things}, each with a short remark.{form}",
            f"Make a checklist for "
            f"{pick(rng, ['moving house', 'a picnic', 'a job interview', 'a long flight', 'spring cleaning'])}."
            f"{form}",
            f"What are the steps to "
            f"{pick(rng, ['bake bread', 'change a tyre', 'paint a room', 'start a blog', 'make coffee'])}?"
            f"{form}",
            f"Write {n} questions about {pick(rng, TOPICS)}.{form}",
            f"Give {n} facts about {pick(rng, TOPICS)}.{form}",
            f"List the advantages and disadvantages of {pick(rng, TOPICS)}.{form}",
            f"Make a plan for a day in {pick(rng, CITIES)}, hour by hour.{form}",
        ],
    )


def maths(rng: random.Random) -> str:
    a, b, c = rng.randint(3, 60), rng.randint(3, 40), rng.randint(2, 12)
    name, goods = pick(rng, NAMES), pick(rng, GOODS)
    return pick(
        rng,
        [
            f"Calculate {a} * {b}. Explain how you do it.",
            f"What is {a * c} divided by {c}? Show the steps.",
            f"{name} buys {c} boxes of {goods} with {a} in each box and gives away {b}. How many are left?",
            f"Solve for x: {c}x - {a} = {b}. Show every step.",
            f"Solve {c}x + {a} = {a + c * b} and check your answer.",
            f"What is {c * 5}% of {a * 10}? Explain.",
            f"Write out the multiplication table of {c + 1} up to {c + 1} x 10.",
            f"A car drives {a + 40} km per hour for {c} hours. How far does it get? Show your work.",
            f"A rectangle is {a} cm wide and {b} cm high. What are its area and its perimeter?",
            f"{goods.capitalize()} cost {c} euros each. What do {b} of them cost with a discount of {c} percent?",
            f"{name} is {a} years old. In how many years will {name} be {a + b}? Explain the reasoning.",
            f"Find the average of {a}, {b}, {c} and {a + b}.",
            f"Simplify the fraction {c * a}/{c * b} step by step.",
            f"Convert {a * 10} minutes to hours and minutes.",
            f"Is {a * 2 + 1} a prime number? Explain.",
            f"Write the first ten terms of the sequence that starts with {a} and grows by {c} each time.",
            f"Three friends share {3 * a} {goods} equally. How many does each get? Then explain it to a child.",
            f"Expand (x + {c})(x - {b}) and show each step.",
        ],
    )


def code_completion(rng: random.Random) -> str:
    signature, _, purpose = pick(rng, FUNCTIONS).partition(": ")
    language = pick(rng, ["Python", "Python", "Python", "JavaScript", "Java", "C", "Go", "Ruby"])
    name, table = signature.partition("(")[0], pick(rng, NOUNS)
    return pick(
        rng,
        [
            f"Write a {language} function {signature} that returns {purpose}.",
            f'Complete the function:\n\n```python\ndef {signature}:\n    """{purpose.capitalize()}."""\n```',
            f"Implement this in Python:\n\ndef {signature}:\n    # {purpose}",
            f"Write a {language} class {pick(rng, CLASSES)}.",
            f"Write a Python class {pick(rng, CLASSES)}. Add docstrings.",
            f"Write tests with pytest for a function `{signature}` ({purpose}).",
            f"Write a SQL query that selects the {table}s with the highest {pick(rng, NOUNS)} from a table `{table}s`.",
            f"Write a bash script that "
            f"{pick(rng, ['renames all text files', 'counts files by type', 'backs up a folder'])}.",
            f"Show an example of how to use `{name}` in {language}, with its definition.",
            f"Write an HTML page with {pick(rng, ['a form', 'a table', 'a navigation bar', 'a list'])} about "
            f"{pick(rng, TOPICS)}.",
            f"Write a program in {language} that asks for a {pick(rng, NOUNS)} and prints {purpose}.",
            f"Continue this code:\n\n```python\nimport json\n\n\ndef {signature}:\n    result =\n```",
        ],
    )


def snippet(rng: random.Random) -> str:
    """A little program with names drawn at random."""
    a, b, c, f = rng.sample(NOUNS, 4)
    n = rng.randint(2, 90)
    return pick(
        rng,
        [
            f"def get_{f}({a}s):\n    {b} = 0\n    for {a} in {a}s:\n        if {a} > {n}:\n            {b} += "
            f"{a}\n    return {b}",
            f"def find_{f}({a}s, {b}):\n    for i in range(len({a}s)):\n        if {a}s[i] == {b}:\n            "
            f"return i\n"
            f"    return -1",
            f'def {a}_to_{b}({c}):\n    result = []\n    for part in {c}.split(","):\n        part = part.strip()\n'
            f"        if part:\n            result.append(part.lower())\n    return result",
            f"class {a.capitalize()}:\n    def __init__(self, {b}, {c}={n}):\n        self.{b} = {b}\n        "
            f"self.{c} = {c}\n\n"
            f"    def update(self, {f}):\n        self.{c} = self.{c} + {f}\n        return self.{c}\n\n"
            f"    def show(self):\n        print(self.{b}, self.{c})",
            f"{a}s = [{n}, {n + 3}, {n * 2}]\n{b} = []\nfor {a} in {a}s:\n    {b}.append({a} * {c})\nprint({b})",
            f"function {f}({a}, {b}) "
            f"{{\n  var {c} = {a} + {b};\n  if ({c} > {n}) {{\n    return {c} - {n};\n  }}\n  return {c};\n}}",
            f"def load_{f}(path):\n    {a}s = {{}}\n    file = open(path)\n    for line in file:\n        {b}, "
            f"{c} = line.split()\n"
            f"        {a}s[{b}] = int({c})\n    file.close()\n    return {a}s",
            f"def {f}({a}, {b}={n}):\n    if {a} is None:\n        return {b}\n    while {a} > {b}:\n        {a} "
            f"= {a} - {b}\n"
            f"    return {a}",
            f"public int {f}(int[] {a}s) "
            f"{{\n    int {b} = 0;\n    for (int {a} : {a}s) {{\n        {b} = {b} + {a};\n    }}\n"
            f"    return {b};\n}}",
        ],
    )


def code_edit(rng: random.Random, code: str) -> str:
    names = sorted(
        set(re.findall(r"\b[a-z_]{3,}\b", code)) - {"def", "for", "return", "class", "self", "while", "function"}
    )
    old, new = pick(rng, names or ["x"]), pick(rng, NOUNS) + pick(rng, ["", "_list", "_value", "s", "_new"])
    told = pick(
        rng,
        [
            f"Rename `{old}` to `{new}`.",
            f"Change the name {old} to {new} everywhere.",
            "Add comments to this code.",
            "Add docstrings.",
            "Add type hints.",
            "Make this code shorter.",
            "Find possible errors and correct them.",
            "Add error handling.",
            "Change the quotation marks and the indentation to four spaces.",
            f"Add a parameter `{new}` with the default value {rng.randint(1, 9)}.",
            "Add a line that prints the result.",
            "Rewrite it with more readable names.",
            f"Replace every number by a constant called {new.upper()}.",
            "Turn it into a class.",
            "Write it again without changes, and add a usage example.",
            "Handle empty input.",
        ],
    )
    whole = pick(rng, ["", " Show the complete code.", " Return the full code.", " Only code, please."])
    return pick(rng, [f"{told}{whole}\n\n```\n{code}\n```", f"Here is some code:\n\n{code}\n\n{told}{whole}"])


def records(rng: random.Random) -> tuple[list[str], str]:
    """Column names, and sentences that hold a few rows of them."""
    n = rng.randint(3, 5)
    rows = [(pick(rng, NAMES), pick(rng, JOBS), pick(rng, CITIES), rng.randint(18, 80)) for _ in range(n)]
    kind = rng.randrange(4)
    if kind == 0:
        return ["name", "job", "city"], " ".join(f"{a} is a {j} from {c}." for a, j, c, _ in rows)
    if kind == 1:
        return ["product", "price", "stock"], " ".join(
            f"The {pick(rng, GOODS)} cost {p} euros, and there are {3 * p} of them." for *_, p in rows
        )
    if kind == 2:
        return ["name", "age", "animal"], " ".join(f"{a}, {p}, has a {pick(rng, ANIMALS)}." for a, _, _, p in rows)
    return ["from", "to", "minutes"], " ".join(
        f"The train from {c} to {pick(rng, CITIES)} takes {p} minutes." for _, _, c, p in rows
    )


def structured(rng: random.Random) -> str:
    columns, text = records(rng)
    form = pick(rng, ["JSON", "JSON", "YAML", "CSV", "XML", "a Markdown table", "an HTML table", "TOML"])
    named = ", ".join(columns)
    a, b, c = rng.sample(NOUNS, 3)
    flat = "\n".join(f"{key}={rng.randint(1, 99)}" for key in (a, b, c))
    return pick(
        rng,
        [
            f"Convert this text to {form} with the fields {named}:\n\n{text}",
            f"Extract {named} as {form}.\n\n{text}",
            f"{text}\n\nWrite this as {form}.",
            f"Create {form} with five made-up entries with {named}.",
            f"Make {form} of these settings:\n\n{flat}",
            f"Write a JSON schema for an object with {a}, {b} and {c}.",
            f"Write {form} that describes "
            f"{pick(rng, ['a recipe', 'a book', 'a user profile', 'a menu', 'a timetable'])}.",
            f"Write a "
            f"{pick(rng, ['Dockerfile', 'package.json', 'GitHub Actions workflow', 'docker-compose file'])} for a "
            f"small {pick(rng, ['Python', 'Node', 'Go'])} project called {a}-{b}.",
            f"Give me {form} with {rng.randint(4, 8)} {pick(rng, THINGS)}.",
            f"Sort the data by {columns[-1]} and print it as {form}.\n\n{text}",
        ],
    )


def translation(rng: random.Random, text: str) -> str:
    language = pick(rng, LANGUAGES)
    sentences = re.findall(r"[^.!?]+[.!?]", text) or [text]
    few = "".join(sentences[: rng.randint(1, 3)]).strip()
    words = ", ".join(word.replace("_", " ") for word in rng.sample(WORDS, rng.randint(5, 12)))
    return pick(
        rng,
        [
            f"Translate to {language}: {few}",
            f"Translate the following text to {language}.\n\n{few}",
            f"How do you say this in {language}?\n\n{few}",
            f"{few}\n\nTranslate this into {language}, please.",
            f"Translate these words to {language}: {words}.",
            f"Make a vocabulary list English - {language}: {words}.",
            f"Rewrite this in simpler words: {few}",
            f"Rewrite this more formally: {few}",
            f"Correct the grammar: {few.lower()}",
            f"Say in {language} and in English: good morning, thank you, {words}.",
        ],
    )


# kind → (its share in percent, a template)
KINDS: dict[str, tuple[int, Callable[[random.Random], str]]] = {
    "copy_heavy_summary": (6, lambda rng: summary(rng, passage(rng))),
    "retrieval_answer": (6, lambda rng: retrieval(rng, passage(rng))),
    "code_edit": (12, lambda rng: code_edit(rng, snippet(rng))),
    "code_completion": (13, code_completion),
    "structured_output": (14, structured),
    "list": (11, listing),
    "maths": (11, maths),
    "translation": (8, lambda rng: translation(rng, passage(rng))),
    "open_story": (9, story),
    "explanation": (10, explanation),
}


# Beginnings of questions about code and structured output, for the target to finish: more kinds than templates have.
# Those that end in a space make it go on with a line break or a number as often as with a name: odd code, but code.
STARTS: dict[str, tuple[str, ...]] = {
    "code_completion": (
        "Write a Python function that",
        "Write a Python function called",
        "Write a short Python program that",
        "Complete this Python function.\n\n```python\ndef ",
        "Implement this function:\n\n```python\ndef ",
        "Finish this class.\n\n```python\nclass ",
        "Continue this program.\n\n```python\nimport ",
        "Write a Python class",
        "Write a JavaScript function that",
        "Write a Java method that",
        "Write a C function that",
        "Write a SQL query that",
        "Write a shell script that",
        "Write a regular expression that",
        "Write an HTML page",
        "Write CSS for",
        "Write unit tests for this function.\n\n```python\ndef ",
        "Write a test for",
        "Write a loop that",
        "Write a decorator that",
    ),
    "code_edit": (
        "Find the mistake in this code.\n\n```python\n",
        "Add a docstring to this function.\n\n```python\ndef ",
        "Add type hints to this code.\n\n```python\ndef ",
        "Make this function shorter.\n\n```python\ndef ",
        "Rename the variables so that they say what they hold.\n\n```python\ndef ",
        "Write this in JavaScript instead.\n\n```python\ndef ",
    ),
    "structured_output": (
        "Write a JSON object that describes",
        "Give me a JSON list of",
        "Make JSON of these notes.\n\n",
        "Make a Markdown table of",
        "Make a Markdown table with the columns",
        "Put this into a table.\n\n",
        "Write a YAML file for",
        "Write this as YAML.\n\n",
        "Make a CSV file with the header",
        "Write an XML document for",
        "Write a TOML configuration for",
        "Take the names and dates out of this text, as JSON.\n\n",
        "Fill in a form with name, date and place.\n\n",
    ),
}


def starts(count: int, seed: int) -> list[tuple[str, str]]:
    """So many pairs (kind, beginning of a question), each beginning about as often as any other."""
    known = [(kind, start) for kind, some in STARTS.items() for start in some]
    random.Random(seed).shuffle(known)
    return list(itertools.islice(itertools.cycle(known), count))


def questions(count: int, seed: int) -> Iterator[tuple[str, str]]:
    """So many pairs (kind, question), the same for the same seed, in random order; none twice, none held out."""
    rng, runs = random.Random(seed), held_out_runs()
    seen: set[str] = set()
    kinds, shares = list(KINDS), [share for share, _ in KINDS.values()]
    while len(seen) < count:
        (kind,) = rng.choices(kinds, shares)
        question = KINDS[kind][1](rng)
        if question not in seen and not overlaps(question, runs):
            seen.add(question)
            yield kind, question


def further(answers: Iterable[tuple[str, str]], seed: int) -> Iterator[tuple[str, str]]:
    """Tasks about what the target has written: pairs (kind, answer) in, pairs (kind, question) out, never held out.

    Every third piece of code is to be edited; all prose is to be summarised, searched or translated.
    """
    rng, runs = random.Random(seed), held_out_runs()
    for kind, answer in answers:
        code = re.search(r"```\w*\n(.{60,700}?)```", answer, re.DOTALL)
        if code and rng.random() < 1 / 3:
            made = "code_edit", code_edit(rng, code[1].strip())
        elif kind in ("open_story", "explanation") and len(text := whole_sentences(answer, 700)) > 150:
            make = rng.choice(
                (("copy_heavy_summary", summary), ("retrieval_answer", retrieval), ("translation", translation))
            )
            made = make[0], make[1](rng, text)
        else:
            continue
        if not overlaps(made[1], runs):
            yield made


def whole_sentences(text: str, most: int) -> str:
    """The beginning of a text up to the last full stop within ``most`` characters."""
    return re.sub(r"\s+", " ", text[: text.rfind(".", 0, most) + 1]).strip()


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def held_out_runs(texts: Iterable[str] | None = None) -> set[tuple[str, ...]]:
    """Every run of `RUN` words of the texts (shorter ones as a whole); by default of the suite that measures."""
    if texts is None:
        texts = [turn for prompt in load_prompts() for turn in prompt.turns]
    return {run for text in texts for run in _runs(words_of(text))}


def _runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    for i in range(max(1, len(words) - RUN + 1)):
        yield tuple(words[i : i + RUN])


def overlaps(text: str, runs: set[tuple[str, ...]]) -> bool:
    """Whether a text shares a run of `RUN` words with those that the runs were taken from."""
    return any(run in runs for run in _runs(words_of(text)))


def as_json(pairs: Iterable[tuple[str, str]]) -> str:
    """Pairs (kind, question) as JSON lines."""
    return "".join(json.dumps({"category": kind, "turns": [text]}, ensure_ascii=False) + "\n" for kind, text in pairs)
