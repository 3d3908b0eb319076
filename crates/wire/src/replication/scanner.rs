//! A command's words (`repl_scanner.l`, PostgreSQL 18). There are no comments in it, and quoted texts have no escapes but
//! their doubled quotes.

use walrider_layout::Lsn;

use super::CommandError;

/// The longest name in bytes, without its end (`NAMEDATALEN`); what is longer is cut.
const MAX_NAME: usize = 63;

/// The words that are no names, unless in lower case or in quotes.
const KEYWORDS: [&str; 21] = [
    "ALTER_REPLICATION_SLOT",
    "BASE_BACKUP",
    "CREATE_REPLICATION_SLOT",
    "DROP_REPLICATION_SLOT",
    "EXPORT_SNAPSHOT",
    "IDENTIFY_SYSTEM",
    "LOGICAL",
    "NOEXPORT_SNAPSHOT",
    "PHYSICAL",
    "READ_REPLICATION_SLOT",
    "RESERVE_WAL",
    "SHOW",
    "SLOT",
    "START_REPLICATION",
    "TEMPORARY",
    "TIMELINE",
    "TIMELINE_HISTORY",
    "TWO_PHASE",
    "UPLOAD_MANIFEST",
    "USE_SNAPSHOT",
    "WAIT",
];

/// A word of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Token<'a> {
    /// A word without quotes, as it is written.
    Word(&'a str),
    /// A name in double quotes, without them.
    Name(String),
    /// A text in single quotes, without them.
    Text(String),
    /// A number, if it has not more than 32 bits.
    Number(Option<u32>),
    /// A position, if its halves have not more than 32 bits.
    Position(Option<Lsn>),
    /// A byte that is none of these.
    Other(u8),
    /// There is no more.
    End,
}

impl Token<'_> {
    /// Whether this is the keyword, in upper or lower case.
    pub(super) fn is(&self, keyword: &str) -> bool {
        matches!(self, Token::Word(word) if word.eq_ignore_ascii_case(keyword))
    }

    /// The name that this is; no keyword is one.
    pub(super) fn name(&self) -> Option<String> {
        match self {
            Token::Word(word) if !KEYWORDS.contains(word) => Some(cut(word).to_ascii_lowercase()),
            Token::Name(name) => Some(cut(name).to_owned()),
            _ => None,
        }
    }

    /// The name that this is, as those of options, which nearly all keywords can be.
    pub(super) fn option_name(&self) -> Option<String> {
        match self {
            Token::Word("READ_REPLICATION_SLOT") => None,
            Token::Word(word) => Some(cut(word).to_ascii_lowercase()),
            _ => self.name(),
        }
    }
}

/// As much of a name as is kept; no character is cut through.
fn cut(name: &str) -> &str {
    let end = (0..=MAX_NAME.min(name.len())).rev().find(|&end| name.is_char_boundary(end));
    &name[..end.unwrap_or(0)]
}

/// What is left of a command.
#[derive(Clone, Copy)]
pub(super) struct Scanner<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Scanner<'a> {
    pub(super) fn new(text: &'a str) -> Scanner<'a> {
        Scanner { text, at: 0 }
    }

    /// Which character is at this byte, counted from one.
    pub(super) fn character(&self, at: usize) -> usize {
        self.text[..at].chars().count() + 1
    }

    /// The next word, and the byte at which it begins. The longest is taken that can be.
    pub(super) fn next(&mut self) -> Result<(usize, Token<'a>), CommandError> {
        self.at += run(self.rest(), |byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c));
        let (begin, rest) = (self.at, self.rest());
        let Some(&first) = rest.as_bytes().first() else { return Ok((begin, Token::End)) };
        if matches!(first, b'\'' | b'"') {
            let Some(text) = self.quoted(first) else {
                return Err(CommandError::Unterminated { at: self.character(begin) });
            };
            return Ok((begin, if first == b'"' { Token::Name(text) } else { Token::Text(text) }));
        }
        let (len, token) = if let Some(len) = position(rest) {
            let half = |digits| u32::from_str_radix(digits, 16).ok().map(u64::from);
            let halves = rest[..len].split_once('/');
            let lsn = halves.and_then(|(high, low)| Some(Lsn(half(high)? << 32 | half(low)?)));
            (len, Token::Position(lsn))
        } else if first.is_ascii_digit() {
            let len = run(rest, |byte| byte.is_ascii_digit());
            (len, Token::Number(rest[..len].parse().ok()))
        } else if letter(first) {
            let len = run(rest, |byte| letter(byte) || byte.is_ascii_digit() || byte == b'$');
            (len, Token::Word(&rest[..len]))
        } else {
            (1, Token::Other(first))
        };
        self.at += len;
        Ok((begin, token))
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// A text in quotes of this kind; `None` if they are not closed, or it holds a zero byte, which no text has.
    fn quoted(&mut self, quote: u8) -> Option<String> {
        let mut text = String::new();
        loop {
            let inside = &self.rest()[1..];
            let end = run(inside, |byte| byte != quote && byte != 0);
            text.push_str(&inside[..end]);
            if inside.as_bytes().get(end) != Some(&quote) {
                return None;
            }
            self.at += 1 + end;
            // After a quote another one, which stands for itself and begins the next part.
            if inside.as_bytes().get(end + 1) != Some(&quote) {
                self.at += 1;
                return Some(text);
            }
            self.at += 1;
            text.push(char::from(quote));
        }
    }
}

/// A byte that names begin with; all of those beyond ASCII are.
fn letter(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || byte == b'_' || !byte.is_ascii()
}

/// How many bytes at the front are such ones.
fn run(text: &str, is: impl Fn(u8) -> bool) -> usize {
    text.bytes().position(|byte| !is(byte)).unwrap_or(text.len())
}

/// The length of the position at the front, if there is one.
fn position(text: &str) -> Option<usize> {
    let digits = |text: &str| run(text, |byte| byte.is_ascii_hexdigit());
    let high = digits(text);
    let low = digits(text[high..].strip_prefix('/')?);
    (high > 0 && low > 0).then_some(high + 1 + low)
}
