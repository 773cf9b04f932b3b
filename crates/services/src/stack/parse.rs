//! Reading an expression.

use std::{collections::HashMap, iter::Peekable, str::CharIndices, str::FromStr};

use thiserror::Error;

use super::{LEAF_SETTINGS, Leaf, MAX_DEPTH, Node, NodeError, ServiceNode, is_leaf, mistaken, stray};
use crate::settings::{Settings, is_plain};

/// An expression that is no stack, or one that cannot be.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("stack, column {column}: {message}")]
pub struct ParseError {
    /// The column in characters, from 1.
    pub column: usize,
    /// What is wrong there.
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    /// A word, and whether any of it was in quotes.
    Word(String, bool),
    Open,
    Close,
    Comma,
    Bar,
}

impl Token {
    fn text(&self) -> String {
        match self {
            Self::Word(word, _) => format!("{word:?}"),
            Self::Open => "\"(\"".to_owned(),
            Self::Close => "\")\"".to_owned(),
            Self::Comma => "\",\"".to_owned(),
            Self::Bar => "\"|\"".to_owned(),
        }
    }
}

/// Where nodes and their settings stand: by the way to the node, and the setting's name.
type Columns = HashMap<(Vec<usize>, Option<String>), usize>;

struct Parser {
    tokens: Vec<(usize, Token)>,
    next: usize,
    /// The column after the last token.
    end: usize,
    columns: Columns,
}

fn lex(text: &str) -> Result<Vec<(usize, Token)>, ParseError> {
    let mut tokens = Vec::new();
    let mut chars = text.char_indices().peekable();
    while let Some(&(at, c)) = chars.peek() {
        let column = text[..at].chars().count() + 1;
        let single = match c {
            '(' => Token::Open,
            ')' => Token::Close,
            ',' => Token::Comma,
            '|' => Token::Bar,
            c if c.is_whitespace() => {
                chars.next();
                continue;
            }
            c if is_plain(c) || c == '"' => {
                let (word, quoted) = word(&mut chars, column)?;
                tokens.push((column, Token::Word(word, quoted)));
                continue;
            }
            c => return Err(ParseError { column, message: format!("{c:?} cannot stand here; put it in quotes") }),
        };
        chars.next();
        tokens.push((column, single));
    }
    Ok(tokens)
}

/// A word; parts of it may be in quotes.
fn word(chars: &mut Peekable<CharIndices<'_>>, column: usize) -> Result<(String, bool), ParseError> {
    let (mut word, mut quoted) = (String::new(), false);
    while let Some(&(_, c)) = chars.peek() {
        if c == '"' {
            quoted = true;
            chars.next();
            loop {
                match chars.next() {
                    Some((_, '"')) => break,
                    Some((_, '\\')) => word.extend(chars.next().map(|(_, c)| c)),
                    Some((_, c)) => word.push(c),
                    None => return Err(ParseError { column, message: "the quotes do not end".to_owned() }),
                }
            }
        } else if is_plain(c) {
            word.push(c);
            chars.next();
        } else {
            break;
        }
    }
    Ok((word, quoted))
}

/// A setting's name and value, if the word is one.
fn setting(word: &str) -> Option<(&str, &str)> {
    let (name, value) = word.split_once('=')?;
    let first = name.chars().next().is_some_and(|c| c.is_ascii_lowercase());
    let rest = name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-'));
    (first && rest).then_some((name, value))
}

impl Parser {
    fn column(&self) -> usize {
        self.tokens.get(self.next).map_or(self.end, |(column, _)| *column)
    }

    fn wrong<T>(&self, wanted: &str) -> Result<T, ParseError> {
        let found = self.tokens.get(self.next).map_or("the end".to_owned(), |(_, token)| token.text());
        let is_word = |at: usize| matches!(self.tokens.get(at), Some((_, Token::Word(..))));
        let is_torn = is_word(self.next) && self.next.checked_sub(1).is_some_and(is_word);
        let hint = if is_torn { "; what has spaces stands in quotes" } else { "" };
        Err(ParseError { column: self.column(), message: format!("{wanted} is expected, not {found}{hint}") })
    }

    fn take(&mut self, wanted: &Token) -> bool {
        let found = self.tokens.get(self.next).is_some_and(|(_, token)| token == wanted);
        self.next += usize::from(found);
        found
    }

    /// A node, with what follows its bar.
    fn node(&mut self, path: &mut Vec<usize>) -> Result<Node, ParseError> {
        let column = self.column();
        if path.len() > MAX_DEPTH {
            return Err(ParseError { column, message: format!("a stack has at most {MAX_DEPTH} levels") });
        }
        let Some((_, Token::Word(word, _))) = self.tokens.get(self.next).cloned() else {
            return self.wrong("a service or back end");
        };
        if setting(&word).is_some() {
            return self.wrong("a service or back end");
        }
        self.next += 1;
        self.columns.insert((path.clone(), None), column);
        let (mut settings, mut legs) = (Settings::default(), Vec::new());
        if self.take(&Token::Open) && !self.take(&Token::Close) {
            loop {
                self.argument(path, &mut settings, &mut legs)?;
                if self.take(&Token::Close) {
                    break;
                }
                if !self.take(&Token::Comma) {
                    return self.wrong("\",\" or \")\"");
                }
            }
        }
        if is_leaf(&word) {
            if let Some((at, what)) = stray(&legs).and_then(|(at, leg)| Some((at, mistaken(LEAF_SETTINGS, leg)?))) {
                let column = self.columns.get(&([&path[..], &[at]].concat(), None)).copied().unwrap_or(column);
                return Err(ParseError { column, message: format!("{word}: {what}") });
            }
            if !legs.is_empty() || self.take(&Token::Bar) {
                return Err(ParseError { column, message: format!("{word} is a back end: nothing can be below it") });
            }
            return Ok(Node::Leaf(Leaf { spec: word, settings }));
        }
        if self.take(&Token::Bar) {
            path.push(legs.len());
            legs.push(self.node(path)?);
            path.pop();
        }
        Ok(Node::Service(ServiceNode { service: word, settings, legs }))
    }

    fn argument(&mut self, path: &mut Vec<usize>, settings: &mut Settings, legs: &mut Vec<Node>) -> Result<(), ParseError> {
        let column = self.column();
        let found = match self.tokens.get(self.next) {
            Some((_, Token::Word(word, _))) => setting(word).map(|(name, value)| (name.to_owned(), value.to_owned())),
            _ => None,
        };
        let Some((name, value)) = found else {
            path.push(legs.len());
            legs.push(self.node(path)?);
            path.pop();
            return Ok(());
        };
        self.next += 1;
        if !settings.add(&name, &value) {
            return Err(ParseError { column, message: format!("{name} is set already") });
        }
        self.columns.insert((path.clone(), Some(name)), column);
        Ok(())
    }
}

impl FromStr for Node {
    type Err = ParseError;

    /// Reads an expression, and checks it ([`Node::check`]).
    fn from_str(text: &str) -> Result<Self, ParseError> {
        let tokens = lex(text)?;
        let mut parser = Parser { tokens, next: 0, end: text.chars().count() + 1, columns: Columns::new() };
        let node = parser.node(&mut Vec::new())?;
        if parser.next < parser.tokens.len() {
            return parser.wrong("\"|\" or the end");
        }
        node.check().map_err(|error| parser.place(error))?;
        Ok(node)
    }
}

impl Parser {
    /// Gives an error its column.
    fn place(&self, error: NodeError) -> ParseError {
        let NodeError { node, setting, what, path } = error;
        let exact = setting.is_some().then(|| self.columns.get(&(path.clone(), setting)).copied()).flatten();
        let column = exact.or_else(|| self.columns.get(&(path, None)).copied()).unwrap_or(1);
        ParseError { column, message: format!("{node}: {what}") }
    }
}
