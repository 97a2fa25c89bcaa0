"""A little general text for calibration, written for this project and free to use with it.

Re-routing needs no labels and no training data, only ordinary prose of many kinds.
"""

GENERAL_TEXTS: tuple[str, ...] = (
    "The ferry leaves the northern pier at seven each morning and returns before the shops close.",
    "Water boils at a lower temperature in the mountains, so beans take longer to soften there.",
    "She kept every letter in a tin box under the stairs, sorted by year and tied with string.",
    "A triangle whose sides measure 3, 4 and 5 units has a right angle opposite the longest side.",
    "To reset the router, hold the small button for ten seconds until both lights begin to blink.",
    "The committee approved the budget by nine votes to four after a debate that lasted all night.",
    "Migrating geese fly in a wedge because each bird rides on the air stirred up by the next one.",
    "Preheat the oven to 200 degrees, line a tray with paper, and roast the carrots until brown.",
    "In 1869 two railways met in the desert, and a journey of months became one of a single week.",
    "Rent is due on the first of the month; a fee of 25 is added when payment is over a week late.",
    "The violin was built in a cold attic by a man who had never taken a lesson in his life.",
    "def mean(values): return sum(values) / len(values) if values else float('nan')",
    "Most of the rain that falls on the plateau never reaches the sea; it sinks into the gravel.",
    "Please find attached the revised contract, with changes to clauses 4 and 11 marked in red.",
    "After the storm the beach was strewn with driftwood, broken crates and hundreds of starfish.",
    "Vaccination teaches the immune system to recognise a germ before it meets the real thing.",
    "The train from Lisbon was forty minutes late, so we missed the concert and went to dinner.",
    "An adjective describes a noun; an adverb may describe a verb, an adjective or another adverb.",
    "Stock 114 units, sold 38, returned 5: the count on the shelf should therefore be 81.",
    "He painted the same hill every autumn for thirty years, and no two of the canvases agree.",
    "Press the brake gently on ice, look where you want to go, and let the wheels find their grip.",
    "The museum is closed on Mondays, except in August, when it stays open until nine at night.",
    "Yeast turns sugar into alcohol and gas, which is why dough rises and why beer has bubbles.",
    "Our survey of 1,204 households found that two in three had changed supplier at least once.",
    "Once upon a time a miller had three sons, and to the youngest he left nothing but the cat.",
    "Light from the nearest star beyond the Sun takes more than four years to arrive at our eyes.",
    "The court held that silence alone cannot be taken as consent, and sent it back for trial.",
    "Fold the paper in half twice, cut along the crease, and open it to find a six-pointed star.",
    "SELECT city, COUNT(*) FROM orders WHERE year = 2024 GROUP BY city ORDER BY 2 DESC;",
    "Goalkeeper Ines Duarte saved two penalties on Saturday to send the home side into the final.",
    "Granite cools slowly far below ground, so its crystals have time to grow large enough to see.",
    "Thank you for calling. If you know the extension you need, you may dial it at any moment.",
)
