//! A line of LLVM's text, cut into words.

/// A word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    /// A keyword, type or label.
    Word(String),
    /// `%name`.
    Local(String),
    /// `@name`.
    Global(String),
    /// `!name` or `!7`.
    Meta(String),
    /// `#7`.
    Attribute,
    /// A number.
    Int(i128),
    /// `"text"`.
    Text(String),
    /// Anything else.
    Mark(char),
}

fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '$' | '-')
}

/// Where a name ends, and the name without its quotes.
fn name(line: &[char], start: usize) -> (String, usize) {
    if line.get(start) == Some(&'"') {
        let end = (start + 1..line.len()).find(|at| line[*at] == '"').unwrap_or(line.len());
        return (line[start + 1..end].iter().collect(), end + 1);
    }
    let end = (start..line.len()).find(|at| !is_name(line[*at])).unwrap_or(line.len());
    (line[start..end].iter().collect(), end)
}

/// The words of a line, without its comment.
pub(crate) fn tokens(line: &str) -> Vec<Token> {
    let line: Vec<char> = line.chars().collect();
    let (mut found, mut at) = (Vec::new(), 0);
    while at < line.len() {
        let c = line[at];
        let (token, end) = match c {
            ' ' | '\t' => {
                at += 1;
                continue;
            }
            ';' => break,
            '%' | '@' | '!' if line.get(at + 1).is_some_and(|c| is_name(*c) || *c == '"') => {
                let (name, end) = name(&line, at + 1);
                let token = match c {
                    '%' => Token::Local(name),
                    '@' => Token::Global(name),
                    _ => Token::Meta(name),
                };
                (token, end)
            }
            '#' => (Token::Attribute, name(&line, at + 1).1),
            '"' => {
                let (text, end) = name(&line, at);
                (Token::Text(text), end)
            }
            c if is_name(c) => {
                let (word, end) = name(&line, at);
                (word.parse().map_or(Token::Word(word), Token::Int), end)
            }
            c => (Token::Mark(c), at + 1),
        };
        found.push(token);
        at = end;
    }
    found
}
