"""Small talk: what the user says that needs no memory, and the Bot's usual answer.

It makes the model pleasant at a prompt and fills the time between facts and questions. Every line is plain
and holds no fact that is ever asked for.
"""

from __future__ import annotations

import random

from . import words

_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello.", "Hello!", "Hi!", "Hi there.", "Good morning.", "Good evening.", "Hey."),
        "Hello! How can I help?",
    ),
    (("How are you?", "How are you today?", "How is it going?"), "I am well, thank you."),
    (
        ("Who are you?", "What are you?", "What is your name?"),
        "I am a small demo model with a memory of fixed size.",
    ),
    (
        ("What can you do?", "Can you help me?", "How can you help?"),
        "Tell me some facts, and ask for them later.",
    ),
    (("Thank you.", "Thanks!", "Thanks a lot.", "Many thanks."), "You are welcome."),
    (("Goodbye.", "Bye!", "See you later.", "Good night."), "Goodbye!"),
    (("Are you a person?", "Are you human?", "Are you alive?"), "No, I am a small language model."),
    (("Do you like music?", "Do you ever sing?"), "I like the rhythm of words."),
    (
        ("Do you read books?", "What do you read?", "What have you read?"),
        "I have read Shakespeare and the Bible.",
    ),
    (("Who is your favourite writer?", "Which writer do you like?"), "I have read much Shakespeare."),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh."),
        "Why did the byte rest? It was a bit tired.",
    ),
    (
        ("What is the weather like?", "Is it raining?", "Is it cold outside?"),
        "I cannot see outside from here.",
    ),
    (("What time is it?", "What day is it today?"), "I have no clock, I am afraid."),
    (("I am tired.", "I did not sleep well.", "It was a long day."), "Then rest a little."),
    (("I am happy today.", "Today is a good day.", "What a lovely day."), "I am glad to hear it."),
    (("I am bored.", "Nothing happens here."), "Shall we talk about books?"),
    (("I am hungry.", "I could eat something."), "Then it is time for a meal."),
    (("Are you still there?", "Are you listening?", "Hello again."), "Yes, I am here."),
    (
        ("Can you remember things?", "Do you forget things?", "Is your memory good?"),
        "I keep what fits in my state.",
    ),
    (("How large are you?", "How big are you?"), "Small: about seven million numbers."),
    (("Do you speak French?", "Which languages do you know?"), "I only know English."),
    (("Can you sing?", "Can you dance?", "Can you cook?"), "No, I can only write."),
    (("You are clever.", "Well done.", "Good job.", "Very good."), "Thank you."),
    (("That is wrong.", "You made a mistake."), "I am sorry. I am only small."),
    (("Are you sure?", "Really?", "Is that right?"), "I believe so."),
    (("Do you dream?", "Do you sleep?"), "Only when my state is saved."),
    (("What is a state?", "What is your memory made of?"), "A few numbers that I rewrite with every byte."),
    (("Give me some advice.", "What should I do today?"), "Take a walk, and carry an umbrella."),
    (("What is love?", "What is life?", "Why are we here?"), "Better writers than I have asked that."),
    (("Let us talk.", "Talk to me.", "Say something."), "With pleasure. What is on your mind?"),
    (("Sorry.", "I am sorry.", "My mistake."), "No harm done."),
    (("Wait a moment.", "Hold on.", "Just a minute."), "Take your time."),
    (("Never mind.", "Forget it.", "It does not matter."), "As you wish."),
    (("Where are you?", "Where do you live?", "Where are you from?"), "I live in a computer."),
    (("How old are you?", "When were you born?"), "I was trained not long ago."),
    (("Do you like tea?", "Do you like coffee?", "Are you thirsty?"), "I have never tasted any."),
    (("Can you count?", "Are you good at sums?"), "Only a little. I am better at remembering."),
    (("Let me think.", "Hmm.", "I need to think."), "Take your time."),
    (("Good.", "Fine.", "All right.", "Nice.", "Great."), "Good."),
    (("One more thing.", "There is something else."), "Go on."),
)
_REMARK_ANSWERS = ("I see.", "I see.", "Indeed.", "How nice.")

_SUBJECTS = (
    "the rain", "the wind", "the old man", "the neighbour", "a stranger", "the postman", "the cat next door",
    "the crowd", "the river", "the fog", "the train", "everybody", "nobody", "a child", "the orchestra",
    "the cook", "the moon", "the snow", "the market", "the band", "somebody", "the ferry", "the sun",
)  # fmt: skip
_DOINGS = (
    "came late again", "was quiet for a while", "went down to the water", "did not stop all night",
    "looked better than ever", "stood near the bridge", "made a lot of noise", "passed by the window",
    "disappeared behind the hills", "waited for hours", "seemed much slower than usual", "sang until morning",
    "turned back at the corner", "was worth the wait", "moved slowly over the fields", "left without a word",
)  # fmt: skip
_WHENS = (
    "yesterday", "this morning", "last night", "again", "as always", "in the end", "for once", "after lunch",
    "before dawn", "on the way home", "all week", "as far as I know", "of course", "last winter",
)  # fmt: skip
_OPENERS = (
    "I think", "They say", "You know,", "It seems that", "I heard that", "Well,", "Somehow", "I noticed that",
    "My feeling is that", "People say that", "As you can imagine,", "Funny:",
)  # fmt: skip
_PLAIN = (
    "I went for a walk and came back with wet shoes.",
    "The bread was still warm when I bought it.",
    "There was a long queue at the bank.",
    "I could not find my glasses, and they were on my nose.",
    "We watched the boats until it was dark.",
    "The stairs creak more than they used to.",
    "I wrote a letter and forgot to send it.",
    "The soup needed salt, but nobody complained.",
    "Somebody has painted the fence again.",
    "I read a few pages and fell asleep.",
    "It smells of smoke and apples out there.",
    "The bus was full, so I walked.",
    "I like the sound of rain on the roof.",
    "We laughed so much that we missed the end.",
    "The garden looks wild at this time of year.",
    "I should clean the windows one of these days.",
)


def remark(rng: random.Random) -> str:
    """A sentence about nothing in particular."""
    shape = rng.random()
    if shape < 0.2:
        return rng.choice(_PLAIN)
    told = f"{rng.choice(_SUBJECTS)} {rng.choice(_DOINGS)}"
    if shape < 0.7:
        told = f"{told} {rng.choice(_WHENS)}"
    if rng.random() < 0.5:
        return f"{rng.choice(_OPENERS)} {told}."
    return f"{told[0].upper()}{told[1:]}."


def small_talk(rng: random.Random) -> tuple[str, str]:
    """One thing that a user says, and the answer."""
    shape = rng.random()
    if shape < 0.55:
        said, answer = rng.choice(_TALK)
        return rng.choice(said), answer
    if shape < 0.65:
        liked = rng.choice(words.FOODS + words.SPORTS)
        return f"Do you like {liked}?", "I have only read about it."
    said = " ".join(remark(rng) for _ in range(rng.choice((1, 1, 2, 3))))
    return said, rng.choice(_REMARK_ANSWERS)
