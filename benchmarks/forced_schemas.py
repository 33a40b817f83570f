"""Eight tools with the schemas of their arguments, as applications declare them, and requests that call them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

TEXT, FLAG = {"type": "string", "maxLength": 60}, {"type": "boolean"}
WHOLE = {"type": "integer", "minimum": 0, "maximum": 99}


@dataclass(frozen=True)
class Tool:
    """requests: what users ask. example: arguments of one call."""

    name: str
    purpose: str
    schema: dict[str, Any]
    requests: tuple[str, ...]
    example: dict[str, Any]

    def messages(self, request: str) -> list[dict[str, str]]:
        """The conversation in which the model has to write the arguments."""
        keys = ", ".join(self.schema["properties"])
        system = f"You call the tool {self.name}: it {self.purpose}. Answer with its arguments as JSON: {keys}."
        return [{"role": "system", "content": system}, {"role": "user", "content": request}]


def _record(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
    }  # fmt: skip


def _list(items: dict[str, Any], most: int = 3) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": most}


def _one(*names: str) -> dict[str, Any]:
    return {"enum": list(names)}


_DATE = {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"}
_TIME = {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"}

TOOLS = (
    Tool(
        "get_weather", "returns the weather forecast of a place",
        _record(location=_record(city=TEXT, country=TEXT), days=WHOLE, temperature_unit=_one("celsius", "fahrenheit"),
                include_hourly_forecast=FLAG, language=_one("english", "german", "french")),
        ("What is the weather in Paris, France this week?", "Will it rain in Oslo, Norway in the next 3 days?",
         "Give me the hourly forecast for Boston in the USA, in fahrenheit.", "How warm is Rome, Italy tomorrow?",
         "Do I need an umbrella in London, England today?", "Forecast for Tokyo, Japan for 5 days, in celsius, please.",
         "Wie wird das Wetter in Berlin, Deutschland am Wochenende?", "Hour by hour for Madrid, Spain, 2 days."),
        {"location": {"city": "Paris", "country": "France"}, "days": 7, "temperature_unit": "celsius",
         "include_hourly_forecast": False, "language": "english"},
    ),
    Tool(
        "create_calendar_event", "adds an event to the calendar",
        _record(title=TEXT, start_date=_DATE, start_time=_TIME, duration_minutes=WHOLE,
                attendees=_list(_record(name=TEXT, response_required=FLAG), 2), visibility=_one("public", "private")),
        ("Plan a meeting with Ann about the budget on 2026-03-04 at 10:30.", "Lunch with Bob on 2026-05-01 at noon.",
         "Book the review of the design with Eve for 2026-06-12, 14:00, one hour.",
         "Private appointment at the dentist, 2026-07-20 at 09:15, with Dr. Lee.",
         "Breakfast with Sam and Kim on 2026-02-17, 08:30, they need not answer.",
         "Block two hours for writing on 2026-09-01 from 13:00, private.",
         "Public talk about energy on 2026-11-05 at 18:00, 90 minutes.",
         "Call with Max on 2026-08-23 at 16:45 for a quarter of an hour."),
        {"title": "Budget", "start_date": "2026-03-04", "start_time": "10:30", "duration_minutes": 30,
         "attendees": [{"name": "Ann", "response_required": True}], "visibility": "public"},
    ),
    Tool(
        "web_search", "searches the web",
        _record(query=TEXT, max_results=WHOLE, time_range=_one("past_day", "past_week", "past_month", "any_time"),
                safe_search=_one("strict", "moderate", "disabled"), include_domains=_list(TEXT, 2), fetch_content=FLAG),
        ("Find news about the elections of this week.", "Who won the football world cup of 2014?",
         "Search python.org for the documentation of asyncio.", "Look for recipes of apple pie on cooking sites.",
         "Reviews of electric bicycles of the past month, and fetch the pages.", "How high is Mount Fuji?",
         "Cheap flights from Vienna to Lisbon, the newest five results.",
         "What do pypi.org and github.com say about the package numpy?"),
        {"query": "elections", "max_results": 10, "time_range": "past_week", "safe_search": "strict",
         "include_domains": ["example.org"], "fetch_content": False},
    ),
    Tool(
        "run_sql_query", "reads rows of a table of a database",
        _record(database=_one("sales", "inventory", "customers"), table_name=TEXT, select_columns=_list(TEXT),
                where_conditions=_list(_record(column=TEXT, operator=_one("equals", "greater_than", "less_than"),
                                               value=TEXT), 2),
                order_by=_record(column=TEXT, direction=_one("ascending", "descending")), row_limit=WHOLE),
        ("Show name and price of the products that cost more than 100.", "List the customers in Berlin by name.",
         "Which orders of the table orders have a total over 500?", "Show items whose stock is less than 5.",
         "The ten newest orders of customer 4711, please.", "Name and city of all customers, sorted by city.",
         "Which products of the table items weigh less than 2?", "The 20 largest invoices of the sales database."),
        {"database": "sales", "table_name": "products", "select_columns": ["name", "price"],
         "where_conditions": [{"column": "price", "operator": "greater_than", "value": "100"}],
         "order_by": {"column": "price", "direction": "descending"}, "row_limit": 10},
    ),
    Tool(
        "edit_file", "replaces text in a file",
        _record(file_path=TEXT, operation=_one("replace_text", "insert_before", "insert_after", "delete_lines"),
                line_range=_record(first_line=WHOLE, last_line=WHOLE), old_string=TEXT, new_string=TEXT,
                create_backup=FLAG, reason_for_change=TEXT),
        ("In src/main.py rename the variable cnt to count in line 12.", "Delete lines 3 to 7 of README.md.",
         "Insert 'import os' before line 1 of tools.py.", "Replace port 80 by 8080 in line 5 of config.yaml.",
         "Add the line 'import json' after line 2 of load.py, no backup.",
         "In docs/index.md correct the word teh in line 40.", "Remove lines 10 to 12 of setup.cfg, they are not used.",
         "Change the color red to blue in lines 3 to 9 of style.css."),
        {"file_path": "src/main.py", "operation": "replace_text", "line_range": {"first_line": 12, "last_line": 12},
         "old_string": "cnt", "new_string": "count", "create_backup": True, "reason_for_change": "clarity"},
    ),
    Tool(
        "send_email", "sends an e-mail",
        _record(recipients=_list(_record(email_address=TEXT, recipient_type=_one("to", "cc", "bcc")), 2), subject=TEXT,
                message_body={"type": "string", "maxLength": 120}, priority=_one("low", "normal", "high"),
                request_read_receipt=FLAG),
        ("Tell ann@example.org that the meeting is moved to Monday.", "Write bob@example.org: the invoice is paid.",
         "Ask eve@example.org for the report, it is urgent.", "Thank joe@example.org for his help.",
         "Invite kim@example.org and sam@example.org to the party on Friday.",
         "Remind max@example.org of the deadline, copy to lea@example.org.",
         "Low priority: tell pat@example.org that the printer works again.",
         "Send the address of the hotel to amy@example.org, and ask for a receipt."),
        {"recipients": [{"email_address": "ann@example.org", "recipient_type": "to"}], "subject": "Meeting",
         "message_body": "The meeting is moved to Monday.", "priority": "normal", "request_read_receipt": False},
    ),
    Tool(
        "extract_support_ticket", "files what a customer reports",
        _record(ticket_category=_one("billing", "technical_problem", "account_access", "feature_request"),
                severity_level=_one("critical", "major", "minor"), affected_product=TEXT, problem_summary=TEXT,
                customer=_record(full_name=TEXT, is_premium_member=FLAG), requires_follow_up=FLAG),
        ("Hello, I am Carla Diaz. The app on my phone crashes when I open the camera.",
         "My name is Tom Hill. I was charged twice for the premium plan in May.",
         "I cannot log in to my account any more since yesterday. Ruth Kahn.",
         "It would be nice if the desktop program had a dark mode. Best, Jim Poe.",
         "The web shop shows an empty page since this morning, nobody can order! Nina Roth.",
         "Please send me the invoice of March again. Premium customer Paul Gray.",
         "I forgot my password and the mail to reset it never arrives. Ada Moss.",
         "Could the tablet app read articles aloud? Thanks, Ben Lake."),
        {"ticket_category": "technical_problem", "severity_level": "major", "affected_product": "app",
         "problem_summary": "It crashes.", "customer": {"full_name": "Carla Diaz", "is_premium_member": False},
         "requires_follow_up": True},
    ),
    Tool(
        "function_call", "calls a function of the smart home",
        _record(function_name=_one("turn_on_device", "turn_off_device", "set_temperature", "lock_door"),
                arguments=_record(device_identifier=TEXT, room_name=_one("kitchen", "living_room", "bedroom", "garage"),
                                  target_value=WHOLE), confirmation_required=FLAG, execution_delay_seconds=WHOLE),
        ("Turn on the lamp in the kitchen.", "Set the heating of the bedroom to 21 degrees.",
         "Lock the door of the garage in 10 seconds.", "Turn off the television in the living room.",
         "Make the living room 19 degrees warm in 5 minutes.", "Switch the fan in the bedroom on.",
         "Shut down the coffee machine in the kitchen, ask me first.", "Lock the kitchen door now."),
        {"function_name": "turn_on_device", "arguments": {"device_identifier": "lamp", "room_name": "kitchen",
         "target_value": 1}, "confirmation_required": False, "execution_delay_seconds": 0},
    ),
)  # fmt: skip
