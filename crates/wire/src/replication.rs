//! The commands of a walsender, read (`repl_gram.y`, `repl_scanner.l`, PostgreSQL 18; [`crate::command`] writes them).
//!
//! What PostgreSQL accepts is accepted, but for numbers of more than 32 bits, of which it takes the lower ones. PostgreSQL
//! knows keywords in upper case only, and takes a command in lower case for SQL. Here they are known in lower case too, but
//! there such a word is still a name where a name is expected, as it is to PostgreSQL.

mod scanner;

use walrider_layout::{Lsn, TimelineId};

use scanner::{Scanner, Token};

/// Options with their values, if they have one: names in lower case unless quoted; numbers in decimal digits.
pub type Options = Vec<(String, Option<String>)>;

/// A command of the replication protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplicationCommand {
    /// Asks for system identifier, timeline, flush position and database.
    IdentifySystem,
    /// Asks for a slot's type, `restart_lsn` and its timeline.
    ReadReplicationSlot {
        /// The slot's name.
        slot: String,
    },
    /// Makes a physical slot.
    CreatePhysicalSlot {
        /// The slot's name.
        slot: String,
        /// It ends with the connection.
        temporary: bool,
        /// `reserve_wal`, and whatever else was given. Options of the old syntax are as of the new one.
        options: Options,
    },
    /// Makes a logical slot.
    CreateLogicalSlot {
        /// The slot's name.
        slot: String,
        /// The name of the output plugin.
        plugin: String,
        /// It ends with the connection.
        temporary: bool,
        /// `snapshot`, `two_phase`, `failover`, and whatever else was given. Options of the old syntax are as of the new one.
        options: Options,
    },
    /// Drops a slot.
    DropReplicationSlot {
        /// The slot's name.
        slot: String,
        /// Not before nobody uses it.
        wait: bool,
    },
    /// Changes a slot.
    AlterReplicationSlot {
        /// The slot's name.
        slot: String,
        /// What to change; at least one.
        options: Options,
    },
    /// Sends WAL as it is.
    StartPhysical {
        /// The slot that holds it.
        slot: Option<String>,
        /// From here, inclusive.
        start: Lsn,
        /// Of this timeline, or the current one; never zero.
        timeline: Option<TimelineId>,
    },
    /// Sends decoded transactions.
    StartLogical {
        /// The slot's name.
        slot: String,
        /// From here, or where the slot was left if that is later.
        start: Lsn,
        /// For the plugin.
        options: Options,
    },
    /// Asks for a timeline's history file; never for zero.
    TimelineHistory(TimelineId),
    /// Asks for a setting.
    Show {
        /// The setting's name, with a dot if it is of an extension.
        name: String,
    },
    /// Sends the data directory.
    BaseBackup {
        /// How.
        options: Options,
    },
    /// Takes the manifest of an earlier backup, for an incremental one.
    UploadManifest,
    /// None of these: SQL, which a walsender with a database executes, and one without refuses. Nothing but the first word
    /// was looked at.
    Sql,
}

/// The command cannot be understood. Characters are counted from one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// A word has no place where it is.
    #[error("syntax error at character {at}")]
    Syntax {
        /// Where the word begins.
        at: usize,
    },
    /// The command ends where more must follow.
    #[error("syntax error at end of command")]
    End,
    /// Quotes are not closed.
    #[error("unterminated quoted string at character {at}")]
    Unterminated {
        /// Where they are opened.
        at: usize,
    },
    /// A number has more than 32 bits.
    #[error("syntax error at character {at}: number out of range")]
    Number {
        /// Where it begins.
        at: usize,
    },
    /// Half of a position has more than 32 bits.
    #[error("invalid streaming start location at character {at}")]
    Position {
        /// Where it begins.
        at: usize,
    },
    /// No timeline has the number zero.
    #[error("invalid timeline 0")]
    Timeline,
}

impl CommandError {
    /// `ERRCODE_SYNTAX_ERROR`, which is that of them all.
    pub const SQLSTATE: &'static str = "42601";
}

impl ReplicationCommand {
    /// Reads the text of a query. What is returned has not more options than the text has bytes.
    ///
    /// ```
    /// use walrider_layout::{Lsn, TimelineId};
    /// use walrider_wire::replication::ReplicationCommand;
    /// let command = ReplicationCommand::parse("START_REPLICATION SLOT a 1/A0 TIMELINE 2;");
    /// let (slot, start, timeline) = (Some("a".to_owned()), Lsn(0x1_0000_00A0), Some(TimelineId(2)));
    /// assert_eq!(command, Ok(ReplicationCommand::StartPhysical { slot, start, timeline }));
    /// assert_eq!(ReplicationCommand::parse("SELECT 1"), Ok(ReplicationCommand::Sql));
    /// ```
    pub fn parse(text: &str) -> Result<ReplicationCommand, CommandError> {
        let mut scanner = Scanner::new(text);
        // Of SQL, this scanner understands the first word at most; but PostgreSQL too expects it to be whole.
        let (at, first) = scanner.next()?;
        let Token::Word(first) = first else { return Ok(ReplicationCommand::Sql) };
        let Some(read) = command(first) else { return Ok(ReplicationCommand::Sql) };
        let mut parser = Parser { scanner, at, token: Token::End };
        parser.advance()?;
        let command = read(&mut parser)?;
        parser.takes_byte(b';')?;
        if parser.token == Token::End { Ok(command) } else { Err(parser.error()) }
    }
}

/// Reads what follows a command's first word.
type Read<'a> = fn(&mut Parser<'a>) -> Result<ReplicationCommand, CommandError>;

/// How a command that begins with this word is read.
fn command<'a>(first: &str) -> Option<Read<'a>> {
    let known: [(&str, Read<'a>); 10] = [
        ("IDENTIFY_SYSTEM", |_| Ok(ReplicationCommand::IdentifySystem)),
        ("READ_REPLICATION_SLOT", |parser| Ok(ReplicationCommand::ReadReplicationSlot { slot: parser.dotted_name()? })),
        ("CREATE_REPLICATION_SLOT", Parser::create),
        ("DROP_REPLICATION_SLOT", |parser| {
            Ok(ReplicationCommand::DropReplicationSlot { slot: parser.name()?, wait: parser.takes("WAIT")? })
        }),
        ("ALTER_REPLICATION_SLOT", |parser| {
            let slot = parser.name()?;
            let options = parser.options(Parser::option)?.ok_or_else(|| parser.error())?;
            Ok(ReplicationCommand::AlterReplicationSlot { slot, options })
        }),
        ("START_REPLICATION", Parser::start),
        ("TIMELINE_HISTORY", |parser| parser.timeline().map(ReplicationCommand::TimelineHistory)),
        ("SHOW", |parser| Ok(ReplicationCommand::Show { name: parser.dotted_name()? })),
        ("BASE_BACKUP", |parser| {
            Ok(ReplicationCommand::BaseBackup { options: parser.options(Parser::option)?.unwrap_or_default() })
        }),
        ("UPLOAD_MANIFEST", |_| Ok(ReplicationCommand::UploadManifest)),
    ];
    known.into_iter().find(|(name, _)| first.eq_ignore_ascii_case(name)).map(|(_, read)| read)
}

/// The options of CREATE_REPLICATION_SLOT before PostgreSQL 15, and what they are called since.
const OLD_OPTIONS: [(&str, &str, &str); 5] = [
    ("EXPORT_SNAPSHOT", "snapshot", "export"),
    ("NOEXPORT_SNAPSHOT", "snapshot", "nothing"),
    ("USE_SNAPSHOT", "snapshot", "use"),
    ("RESERVE_WAL", "reserve_wal", "true"),
    ("TWO_PHASE", "two_phase", "true"),
];

/// One word is known ahead.
struct Parser<'a> {
    scanner: Scanner<'a>,
    /// The byte at which the word begins.
    at: usize,
    token: Token<'a>,
}

impl Parser<'_> {
    fn advance(&mut self) -> Result<(), CommandError> {
        (self.at, self.token) = self.scanner.next()?;
        Ok(())
    }

    /// Why the word ahead cannot be here.
    fn error(&self) -> CommandError {
        let at = self.scanner.character(self.at);
        match self.token {
            Token::End => CommandError::End,
            Token::Number(None) => CommandError::Number { at },
            Token::Position(None) => CommandError::Position { at },
            _ => CommandError::Syntax { at },
        }
    }

    /// Goes past the word ahead, which is or has this, or nothing.
    fn must<T>(&mut self, found: Option<T>) -> Result<T, CommandError> {
        let found = found.ok_or_else(|| self.error())?;
        self.advance()?;
        Ok(found)
    }

    /// Goes past the keyword if it is ahead, and tells whether.
    fn takes(&mut self, keyword: &str) -> Result<bool, CommandError> {
        let is = self.token.is(keyword);
        if is {
            self.advance()?;
        }
        Ok(is)
    }

    fn takes_byte(&mut self, byte: u8) -> Result<bool, CommandError> {
        let is = self.token == Token::Other(byte);
        if is {
            self.advance()?;
        }
        Ok(is)
    }

    fn name(&mut self) -> Result<String, CommandError> {
        self.must(self.token.name())
    }

    fn dotted_name(&mut self) -> Result<String, CommandError> {
        let mut name = self.name()?;
        while self.takes_byte(b'.')? {
            name.push('.');
            name.push_str(&self.name()?);
        }
        Ok(name)
    }

    fn position(&mut self) -> Result<Lsn, CommandError> {
        self.must(if let Token::Position(lsn) = self.token { lsn } else { None })
    }

    fn timeline(&mut self) -> Result<TimelineId, CommandError> {
        match self.must(if let Token::Number(number) = self.token { number } else { None })? {
            0 => Err(CommandError::Timeline),
            number => Ok(TimelineId(number)),
        }
    }

    /// A list in parentheses, if there is one; it has at least one member.
    fn options(
        &mut self,
        option: impl Fn(&mut Self) -> Result<(String, Option<String>), CommandError>,
    ) -> Result<Option<Options>, CommandError> {
        if !self.takes_byte(b'(')? {
            return Ok(None);
        }
        let mut options = vec![option(self)?];
        while self.takes_byte(b',')? {
            options.push(option(self)?);
        }
        self.must((self.token == Token::Other(b')')).then_some(()))?;
        Ok(Some(options))
    }

    /// An option of a command.
    fn option(&mut self) -> Result<(String, Option<String>), CommandError> {
        let name = self.must(self.token.option_name())?;
        let value = match &self.token {
            Token::Text(text) => Some(text.clone()),
            Token::Number(Some(number)) => Some(number.to_string()),
            other => other.name(),
        };
        if value.is_some() {
            self.advance()?;
        }
        Ok((name, value))
    }

    /// An option of an output plugin.
    fn plugin_option(&mut self) -> Result<(String, Option<String>), CommandError> {
        let name = self.name()?;
        let Token::Text(text) = &self.token else { return Ok((name, None)) };
        let value = text.clone();
        self.advance()?;
        Ok((name, Some(value)))
    }

    /// CREATE_REPLICATION_SLOT.
    fn create(&mut self) -> Result<ReplicationCommand, CommandError> {
        let slot = self.name()?;
        let temporary = self.takes("TEMPORARY")?;
        if self.takes("PHYSICAL")? {
            return Ok(ReplicationCommand::CreatePhysicalSlot { slot, temporary, options: self.slot_options()? });
        }
        self.must(self.token.is("LOGICAL").then_some(()))?;
        let plugin = self.name()?;
        Ok(ReplicationCommand::CreateLogicalSlot { slot, plugin, temporary, options: self.slot_options()? })
    }

    fn slot_options(&mut self) -> Result<Options, CommandError> {
        if let Some(options) = self.options(Parser::option)? {
            return Ok(options);
        }
        let mut options = Options::new();
        while let Some((_, name, value)) = OLD_OPTIONS.iter().find(|(word, ..)| self.token.is(word)) {
            self.advance()?;
            options.push(((*name).to_owned(), Some((*value).to_owned())));
        }
        Ok(options)
    }

    /// START_REPLICATION.
    fn start(&mut self) -> Result<ReplicationCommand, CommandError> {
        let slot = if self.takes("SLOT")? { Some(self.name()?) } else { None };
        if let Some(name) = slot.as_ref().filter(|_| self.token.is("LOGICAL")) {
            self.advance()?;
            let (slot, start) = (name.clone(), self.position()?);
            let options = self.options(Parser::plugin_option)?.unwrap_or_default();
            return Ok(ReplicationCommand::StartLogical { slot, start, options });
        }
        self.takes("PHYSICAL")?;
        let start = self.position()?;
        let timeline = if self.takes("TIMELINE")? { Some(self.timeline()?) } else { None };
        Ok(ReplicationCommand::StartPhysical { slot, start, timeline })
    }
}

#[cfg(test)]
#[path = "replication/tests.rs"]
mod tests;
