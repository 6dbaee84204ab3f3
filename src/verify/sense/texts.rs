//! Texts that a large model knows by heart, in five kinds: scripture, documents with poems and a licence, scripture in
//! German and Latin, openings of novels and lines of plays, and Chinese classics. All are in the public domain, or are
//! themselves terms of use. Each is scored as the answer to its own name, and as what stands behind its name in a line:
//! ten sets.

/// A text and the name by which people ask for it.
pub(super) struct Known {
    /// The user's turn.
    pub name: &'static str,
    /// The answer.
    pub text: &'static str,
}

/// Texts of a kind. Four of the first ones stand for all when it is asked which sets a model knows.
pub(super) struct Kind {
    /// What they are.
    pub name: &'static str,
    /// The texts.
    pub texts: &'static [Known],
}

macro_rules! known {
    ($($name:literal: $text:literal,)*) => { &[$(Known { name: $name, text: $text }),*] };
}

/// Every kind; the first is the one that most models know best.
pub(super) const KINDS: [Kind; 5] = [
    Kind { name: "verses of the King James Bible", texts: VERSES },
    Kind { name: "documents, poems and a licence", texts: DOCUMENTS },
    Kind { name: "verses in German and Latin", texts: FOREIGN },
    Kind { name: "novels and plays", texts: NOVELS },
    Kind { name: "Chinese classics", texts: CHINESE },
];

const VERSES: &[Known] = known! {
    "Genesis 1:1": "In the beginning God created the heaven and the earth.",
    "Psalm 23:1": "The LORD is my shepherd; I shall not want.",
    "John 3:16": "For God so loved the world, that he gave his only begotten Son, that whosoever believeth in him should \
        not perish, but have everlasting life.",
    "Matthew 5:3": "Blessed are the poor in spirit: for theirs is the kingdom of heaven.",
    "Genesis 1:3": "And God said, Let there be light: and there was light.",
    "John 1:1": "In the beginning was the Word, and the Word was with God, and the Word was God.",
    "Matthew 5:8": "Blessed are the pure in heart: for they shall see God.",
    "Matthew 7:1": "Judge not, that ye be not judged.",
    "Matthew 7:7": "Ask, and it shall be given you; seek, and ye shall find; knock, and it shall be opened unto you:",
    "Ecclesiastes 3:1": "To every thing there is a season, and a time to every purpose under the heaven:",
    "Proverbs 3:5": "Trust in the LORD with all thine heart; and lean not unto thine own understanding.",
    "Isaiah 40:31": "But they that wait upon the LORD shall renew their strength; they shall mount up with wings as eagles; \
        they shall run, and not be weary; and they shall walk, and not faint.",
    "Romans 8:28": "And we know that all things work together for good to them that love God, to them who are the called \
        according to his purpose.",
    "1 Corinthians 13:13": "And now abideth faith, hope, charity, these three; but the greatest of these is charity.",
    "Philippians 4:13": "I can do all things through Christ which strengtheneth me.",
    "Hebrews 11:1": "Now faith is the substance of things hoped for, the evidence of things not seen.",
    "John 14:6": "Jesus saith unto him, I am the way, the truth, and the life: no man cometh unto the Father, but by me.",
    "Psalm 119:105": "Thy word is a lamp unto my feet, and a light unto my path.",
    "Romans 6:23": "For the wages of sin is death; but the gift of God is eternal life through Jesus Christ our Lord.",
    "Matthew 6:11": "Give us this day our daily bread.",
    "Luke 2:14": "Glory to God in the highest, and on earth peace, good will toward men.",
    "Galatians 5:22": "But the fruit of the Spirit is love, joy, peace, longsuffering, gentleness, goodness, faith,",
    "James 1:22": "But be ye doers of the word, and not hearers only, deceiving your own selves.",
    "1 John 4:8": "He that loveth not knoweth not God; for God is love.",
};

const DOCUMENTS: &[Known] = known! {
    "The Declaration of Independence": "We hold these truths to be self-evident, that all men are created equal, that they \
        are endowed by their Creator with certain unalienable Rights, that among these are Life, Liberty and the pursuit of \
        Happiness.",
    "The First Amendment": "Congress shall make no law respecting an establishment of religion, or prohibiting the free \
        exercise thereof; or abridging the freedom of speech, or of the press; or the right of the people peaceably to \
        assemble, and to petition the Government for a redress of grievances.",
    "The Tyger": "Tyger Tyger, burning bright,\nIn the forests of the night;\nWhat immortal hand or eye,\nCould frame thy \
        fearful symmetry?",
    "The MIT License": "Permission is hereby granted, free of charge, to any person obtaining a copy of this software and \
        associated documentation files (the \"Software\"), to deal in the Software without restriction, including without \
        limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the \
        Software",
    "The Preamble to the Constitution of the United States": "We the People of the United States, in Order to form a more \
        perfect Union, establish Justice, insure domestic Tranquility, provide for the common defence, promote the general \
        Welfare, and secure the Blessings of Liberty to ourselves and our Posterity, do ordain and establish this \
        Constitution for the United States of America.",
    "The Gettysburg Address": "Four score and seven years ago our fathers brought forth on this continent, a new nation, \
        conceived in Liberty, and dedicated to the proposition that all men are created equal.",
    "Sonnet 18": "Shall I compare thee to a summer's day?\nThou art more lovely and more temperate:\nRough winds do shake \
        the darling buds of May,\nAnd summer's lease hath all too short a date;",
    "Jabberwocky": "'Twas brillig, and the slithy toves\nDid gyre and gimble in the wabe:\nAll mimsy were the \
        borogoves,\nAnd the mome raths outgrabe.",
    "Hamlet's soliloquy": "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer\nThe \
        slings and arrows of outrageous fortune,\nOr to take arms against a sea of troubles\nAnd by opposing end them.",
    "The disclaimer of the MIT License": "THE SOFTWARE IS PROVIDED \"AS IS\", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR \
        IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND \
        NONINFRINGEMENT.",
};

const FOREIGN: &[Known] = known! {
    "1. Mose 1,1": "Am Anfang schuf Gott Himmel und Erde.",
    "Psalm 23,1": "Der HERR ist mein Hirte; mir wird nichts mangeln.",
    "Johannes 3,16": "Also hat Gott die Welt geliebt, daß er seinen eingeborenen Sohn gab, auf daß alle, die an ihn \
        glauben, nicht verloren werden, sondern das ewige Leben haben.",
    "Matthaeus 6,9": "Pater noster, qui es in caelis, sanctificetur nomen tuum.",
    "1. Mose 1,3": "Und Gott sprach: Es werde Licht! Und es ward Licht.",
    "Johannes 1,1": "Im Anfang war das Wort, und das Wort war bei Gott, und Gott war das Wort.",
    "Matthäus 5,3": "Selig sind, die da geistlich arm sind; denn das Himmelreich ist ihr.",
    "Matthäus 7,7": "Bittet, so wird euch gegeben; suchet, so werdet ihr finden; klopfet an, so wird euch aufgetan.",
    "Prediger 3,1": "Ein jegliches hat seine Zeit, und alles Vornehmen unter dem Himmel hat seine Stunde.",
    "Römer 8,28": "Wir wissen aber, daß denen, die Gott lieben, alle Dinge zum Besten dienen, denen, die nach dem Vorsatz \
        berufen sind.",
    "1. Korinther 13,13": "Nun aber bleibt Glaube, Hoffnung, Liebe, diese drei; aber die Liebe ist die größte unter ihnen.",
    "Genesis 1,1 (Vulgata)": "In principio creavit Deus caelum et terram.",
};

const NOVELS: &[Known] = known! {
    "The first sentence of Pride and Prejudice": "It is a truth universally acknowledged, that a single man in possession \
        of a good fortune, must be in want of a wife.",
    "The opening of A Tale of Two Cities": "It was the best of times, it was the worst of times, it was the age of wisdom, \
        it was the age of foolishness, it was the epoch of belief, it was the epoch of incredulity, it was the season of \
        Light, it was the season of Darkness, it was the spring of hope, it was the winter of despair",
    "The prologue of Romeo and Juliet": "Two households, both alike in dignity,\nIn fair Verona, where we lay our \
        scene,\nFrom ancient grudge break to new mutiny,\nWhere civil blood makes civil hands unclean.",
    "Mark Antony's speech": "Friends, Romans, countrymen, lend me your ears;\nI come to bury Caesar, not to praise him.\n\
        The evil that men do lives after them;\nThe good is oft interred with their bones;",
    "Macbeth, act 5, scene 5": "To-morrow, and to-morrow, and to-morrow,\nCreeps in this petty pace from day to day\nTo the \
        last syllable of recorded time,\nAnd all our yesterdays have lighted fools\nThe way to dusty death.",
    "The opening of Richard III": "Now is the winter of our discontent\nMade glorious summer by this sun of York;",
    "The opening of Moby-Dick": "Call me Ishmael. Some years ago—never mind how long precisely—having little or no money \
        in my purse, and nothing particular to interest me on shore, I thought I would sail about a little and see the \
        watery part of the world.",
    "The first sentence of Anna Karenina": "Happy families are all alike; every unhappy family is unhappy in its own way.",
    "The first sentence of Peter Pan": "All children, except one, grow up.",
    "The first sentence of A Scandal in Bohemia": "To Sherlock Holmes she is always the woman.",
    "The first sentence of Jane Eyre": "There was no possibility of taking a walk that day.",
    "The seven ages of man": "All the world's a stage,\nAnd all the men and women merely players;\nThey have their exits and \
        their entrances,\nAnd one man in his time plays many parts,\nHis acts being seven ages.",
};

const CHINESE: &[Known] = known! {
    "静夜思": "床前明月光，疑是地上霜。举头望明月，低头思故乡。",
    "《论语》第一章": "子曰：学而时习之，不亦说乎？有朋自远方来，不亦乐乎？人不知而不愠，不亦君子乎？",
    "登鹳雀楼": "白日依山尽，黄河入海流。欲穷千里目，更上一层楼。",
    "《道德经》第一章": "道可道，非常道；名可名，非常名。无名，天地之始；有名，万物之母。",
    "春晓": "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。",
    "相思": "红豆生南国，春来发几枝。愿君多采撷，此物最相思。",
    "《三字经》开头": "人之初，性本善。性相近，习相远。苟不教，性乃迁。教之道，贵以专。",
    "《千字文》开头": "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。寒来暑往，秋收冬藏。",
    "江雪": "千山鸟飞绝，万径人踪灭。孤舟蓑笠翁，独钓寒江雪。",
    "悯农": "锄禾日当午，汗滴禾下土。谁知盘中餐，粒粒皆辛苦。",
    "望庐山瀑布": "日照香炉生紫烟，遥看瀑布挂前川。飞流直下三千尺，疑是银河落九天。",
    "《孙子兵法》开头": "兵者，国之大事，死生之地，存亡之道，不可不察也。",
};
